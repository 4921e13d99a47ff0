"""A tiny model with a tokenizer, saved as an ordinary Hugging Face folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from support import tiny
from support.templates import CHATML, byte_tokenizer

# One token per byte and three special ones: 259 ids.
VOCAB = 259


def model_folder(folder: Path, model: nn.Module, template: str | None = CHATML) -> Path:
    """Save `model` (vocabulary of at least 259) and a byte tokenizer into one folder."""
    model.save_pretrained(folder)
    byte_tokenizer(folder, template)
    return folder


def llama_folder(folder: Path, **fields: object) -> Path:
    """No id is a padding id here: the embedding of one is a row of zeros, and id 0 begins every turn."""
    return model_folder(folder, tiny.build_llama(vocab_size=VOCAB, pad_token_id=None, **fields))


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question: str, answer: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **fields}


CHATS = [
    chat("How far is it?", "About three miles.", id="a"),
    chat("Is it?", "No.", id="b"),
    chat("Tell me more of the road.", "It climbs to a pass and then follows a stream down to the village.", id="c"),
    chat("Hm", "Yes?", id="d"),
    chat("What then?", "Then you are there.", id="e"),
]
