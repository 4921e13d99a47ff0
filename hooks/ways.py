"""The ways of running a model in which a row may depend on its company, and what to do where it does."""

from typing import Literal

Way = Literal[
    "right padding without a mask",
    "right padding with a mask",
    "left padding",
    "left padding with position ids",
    "a static cache",
    "a static cache and a wider mask",
    "a static cache, a wider mask and position ids",
    "one token behind a cache",
    "several tokens behind a cache",
    "several tokens behind a static cache",
    "chunks behind a cache",
]

WAYS_OUT: dict[Way, str] = {
    "right padding without a mask": "Run one sequence a forward (--exact), or give an attention_mask",
    "right padding with a mask": "Run one sequence a forward, or sequences of one length",
    "left padding": "Pad on the right, give position_ids that leave padding out, or run one sequence a forward",
    "left padding with position ids": "Pad on the right, or run one sequence a forward",
    "a static cache": "Use the model's own dynamic cache",
    "a static cache and a wider mask": "Give a mask of the positions that are held and those of the call",
    "a static cache, a wider mask and position ids": "Give a mask of the positions that are held and those of the call",
    "one token behind a cache": "Run the whole sequence without a cache",
    "several tokens behind a cache": "Run one token at a time behind the cache, or the whole sequence without it",
    "several tokens behind a static cache": "Run one token at a time behind the cache, or the whole sequence without it",
    "chunks behind a cache": "Run the whole sequence in one forward, without prefill_chunk (--prefill-chunk)",
}
WHY_FILLING: dict[Way, str] = {
    "right padding without a mask": ": the model is not causal as it is configured",
    "left padding": ": the model does not leave out what its mask leaves out",
    "left padding with position ids": ": the model does not leave out what its mask leaves out",
}
