"""A draw run through hiddentap: which rows its public entry points show for which tokens."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiddentap import (
    CapturedDataset,
    CaptureSettings,
    ModelSource,
    SamplingParams,
    capture_dataset,
    generate_with_capture,
    tap,
    with_capture,
)
from support.templates import byte_tokenizer

from .draws import Draw
from .oracle import SEED
from .ways import Step, padded, run_steps
from .wrappers import WRAPPERS

NEW_TOKENS = 6


class Silent(Exception):  # noqa: N818 - a verdict
    """A captured call that captured nothing and said nothing."""


class WrongPlace(Exception):  # noqa: N818 - a verdict
    """Rows that are said to belong to other positions, or two accounts of one call that differ."""


@dataclass(frozen=True)
class Shown:
    """Rows (L, K, H) that were shown for the tokens `ids` (L,); `prompt` of them were not generated."""

    ids: Tensor
    rows: Tensor
    prompt: int


class Places:
    """Rows by sample and position."""

    def __init__(self, B: int) -> None:
        self.rows: list[dict[int, Tensor]] = [{} for _ in range(B)]

    def add(self, b: int, first: int, rows: Tensor) -> None:
        self.rows[b] |= {first + i: row for i, row in enumerate(rows)}

    def shown(self, b: int, ids: Tensor, prompt: int) -> Shown:
        there = sorted(self.rows[b])
        if not there:
            raise Silent(f"no row of sample {b} of {len(ids)} tokens")
        if there != list(range(len(ids))):
            raise WrongPlace(f"sample {b} of {len(ids)} tokens has rows at {there}")
        return Shown(ids, torch.stack([self.rows[b][t] for t in there]), prompt)


def run(draw: Draw) -> list[Shown]:
    """Run `draw` through hiddentap."""
    return ENTRIES[draw.way.entry](draw, draw.samples())


@torch.no_grad()
def run_plainly(draw: Draw) -> None:
    """The same calls of the same model without hiddentap, to see whether the model can be run so; raises what it raises."""
    samples, model = draw.samples(), draw.model()
    outer = WRAPPERS[draw.wrapper].wrap(model)
    if draw.way.entry == "generate":
        for ids, kwargs in _prompts(draw, samples):
            outer.generate(ids, **kwargs)
    elif draw.way.entry in ("tap", "mixin"):
        run_steps(draw.way, samples, draw.cut, model, lambda step: outer(**_without_lengths(step.kwargs)))


def _without_lengths(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "lengths"}


@torch.no_grad()
def _run_tap(draw: Draw, samples: Sequence[Tensor]) -> list[Shown]:
    model, places = draw.model(), Places(len(samples))
    outer = WRAPPERS[draw.wrapper].wrap(model)
    torch.manual_seed(SEED)
    with tap(outer, draw.layer_ids, stop_early=False if draw.way.cache else None) as t:

        def call(step: Step) -> Any:
            kwargs = dict(step.kwargs) if draw.way.cache else _without(step.kwargs, "use_cache")
            captured = t.run(kwargs.pop("input_ids"), **kwargs)
            _place(places, step, captured.rows(), captured.aux_hidden_states, None)
            return captured.output

        run_steps(draw.way, samples, draw.cut, model, call)
    return [places.shown(i, sample, len(sample)) for i, sample in enumerate(samples)]


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


@torch.no_grad()
def _run_mixin(draw: Draw, samples: Sequence[Tensor]) -> list[Shown]:
    called, _, model = _capturing(draw)
    places = Places(len(samples))
    torch.manual_seed(SEED)

    def call(step: Step) -> Any:
        output = called(**step.kwargs)
        made = getattr(output, "auxiliary_device_output", None)
        if made is None:
            raise Silent(f"the output of {type(called).__name__} has no auxiliary_device_output")
        _place(places, step, made.aux_hidden_states, output.aux_hidden_states, made.layout.first_positions)
        return output

    run_steps(draw.way, samples, draw.cut, model, call)
    return [places.shown(i, sample, len(sample)) for i, sample in enumerate(samples)]


def _capturing(draw: Draw) -> tuple[Any, Any, nn.Module]:
    """What is called, what captures, and the model inside both."""
    model, wrapper = draw.model(), WRAPPERS[draw.wrapper]
    if wrapper.first == "capture":
        capturing = _captured(model, draw)
        return wrapper.wrap(capturing), capturing, model
    outer = wrapper.wrap(model)
    capturing = _captured(outer if wrapper.captured == "outer" else model, draw)
    return outer, capturing, model


def _captured(model: nn.Module, draw: Draw) -> Any:
    captured: Any = with_capture(model)
    captured.set_dspark_layers_to_capture(list(draw.layer_ids))
    return captured


def _place(places: Places, step: Step, rows: Tensor, states: Sequence[Tensor], firsts: Sequence[int] | None) -> None:
    """Rows (T, K, H) and states K x (B, S, H) of one call, which must agree on what is real."""
    counts = [len(real) for real in step.real]
    if len(rows) != sum(counts):
        raise WrongPlace(f"{len(rows)} rows for {sum(counts)} real tokens {counts}")
    for b, part in enumerate(rows.split(counts)):
        held = len(places.rows[step.samples[b]])
        columns = torch.stack([state[b, list(step.real[b])] for state in states], 1)
        if not torch.equal(columns, part):
            raise WrongPlace(f"rows of sample {step.samples[b]} are not the states at columns {step.real[b]}")
        if firsts is not None and firsts[b] != held:
            raise WrongPlace(f"rows of sample {step.samples[b]} are said to begin at {firsts[b]}, not {held}")
        places.add(step.samples[b], held, part)


def _run_threads(draw: Draw, samples: Sequence[Tensor]) -> list[Shown]:
    """The first captured calls of one model, all at once."""
    called, _, _ = _capturing(draw)
    shown: list[Shown | None] = [None] * len(samples)
    failed: list[BaseException] = []
    barrier = threading.Barrier(len(samples))

    @torch.no_grad()
    def work(i: int, sample: Tensor) -> None:
        barrier.wait()
        try:
            output = called(sample[None], use_cache=False)
            shown[i] = Shown(sample, output.auxiliary_device_output.aux_hidden_states, len(sample))
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that judges
            failed.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(samples)]
    with _busy_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return [some for some in shown if some is not None]


@contextlib.contextmanager
def _busy_switching() -> Iterator[None]:
    """Threads take turns often, so that they meet in the middle of what they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@torch.no_grad()
def _run_generate(draw: Draw, samples: Sequence[Tensor]) -> list[Shown]:
    called, capturing, _ = _capturing(draw)
    steps: list[Any] = []
    capturing.on_auxiliary_output = steps.append
    shown: list[Shown] = []
    for ids, kwargs in _prompts(draw, samples):
        steps.clear()
        made = called.generate(ids, **kwargs)
        made = getattr(made, "sequences", made)
        if not steps:
            raise Silent(
                f"generate() of {type(called).__name__} made {made.shape[1] - ids.shape[1]} tokens, no callback"
            )
        places = Places(len(ids))
        for step in steps:
            for b, part in enumerate(step.aux_hidden_states.split(list(step.layout.row_counts))):
                places.add(b, step.layout.first_positions[b], part)
        for b, row in enumerate(made):
            mask = kwargs["attention_mask"][b]
            tokens = torch.cat([row[: ids.shape[1]][mask == 1], row[ids.shape[1] : -1]])
            shown.append(places.shown(b, tokens, int(mask.sum())))
    return shown


def _prompts(draw: Draw, samples: Sequence[Tensor]) -> list[tuple[Tensor, dict[str, Any]]]:
    way, new = draw.way, {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    if "uncached" in way.options:
        new["use_cache"] = False
    if "static" in way.options:
        new |= {"cache_implementation": "static", "disable_compile": True}
    if "chunked" in way.options:
        new["prefill_chunk_size"] = 4
    batches = [[sample] for sample in samples] if way.alone else [list(samples)]
    return [(ids, new | {"attention_mask": mask}) for ids, mask in (padded(batch, way.padding) for batch in batches)]


def _run_offline(draw: Draw, samples: Sequence[Tensor]) -> list[Shown]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        draw.model().save_pretrained(folder / "model")
        byte_tokenizer(folder / "model", None)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps({"input_ids": sample.tolist()}) + "\n" for sample in samples), "utf-8")
        attention = None if draw.attention == "default" else draw.attention
        source = ModelSource(
            str(folder / "model"), dtype=str(draw.dtype).removeprefix("torch."), attn_implementation=attention
        )
        exact = "exact" in draw.way.options
        settings = CaptureSettings(
            model=source, data=(str(rows),), out=folder / "out", layer_ids=draw.layer_ids, final="none",
            exact=exact, batch_tokens=None if exact else 4096, compile="off",
            cpu_fast_paths="auto",
        )  # fmt: skip
        capture_dataset(settings)
        captured = CapturedDataset(folder / "out")
        found = [captured[i] for i in range(len(captured))]
    return [Shown(item["input_ids"], item["aux_hidden_states"], len(item["input_ids"])) for item in found]


def _run_sampling(draw: Draw, samples: Sequence[Tensor]) -> list[Shown]:
    outer = WRAPPERS[draw.wrapper].wrap(draw.model())
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for i in range(len(samples))
    ]
    prompts = [sample.tolist() for sample in samples]
    results = generate_with_capture(
        outer, prompts, params, layer_ids=draw.layer_ids,
        prefill_chunk=4 if "chunked" in draw.way.options else None, prompt_lookup=3 if "lookup" in draw.way.options else 0,
    )  # fmt: skip
    shown = []
    for result, prompt in zip(results, prompts, strict=True):
        tokens = torch.tensor([*prompt, *result.token_ids[:-1]])
        if result.rows["input_ids"].tolist() != tokens.tolist():
            raise WrongPlace(
                f"input_ids of a result are not its prompt and tokens: {result.rows['input_ids'].tolist()}"
            )
        shown.append(Shown(tokens, result.aux_hidden_states, len(prompt)))
    return shown


ENTRIES: dict[str, Callable[[Draw, Sequence[Tensor]], list[Shown]]] = {
    "tap": _run_tap,
    "mixin": _run_mixin,
    "threads": _run_threads,
    "generate": _run_generate,
    "offline": _run_offline,
    "sampling": _run_sampling,
}
