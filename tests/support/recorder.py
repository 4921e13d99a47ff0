"""An independent account of one forward: every module of a model is recorded, and modules are matched by value.

Nothing here asks the code under test anything. The layers are found as the module list whose members feed each other, the
norm as the module that made what the decoder returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Call:
    """One call of one module: every floating tensor that went in and came out, cloned, with its place."""

    path: str
    module: nn.Module
    order: int
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_form: str = ""


class Recorder:
    """Records every call of every module while it is open."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[Call] = []
        self._open: dict[int, list[Call]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        seen: set[int] = set()
        for path, module in self.model.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = Call(path, module, len(self.calls), dict(_tensors((*args, kwargs), "")))
            self.calls.append(call)
            self._open.setdefault(id(module), []).append(call)

        return hook

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        call = self._open[id(module)].pop()
        call.outputs, call.output_form = dict(_tensors(output, "")), form(output)

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]


def record(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Recorder, Any]:
    with torch.no_grad(), Recorder(model) as recorder:
        output = model(*args, **kwargs)
    return recorder, output


def layer_calls(recorder: Recorder, path: str) -> list[Call]:
    """The first call of each layer of the list at `path`."""
    n = len(recorder.model.get_submodule(path))
    return [recorder.of(f"{path}.{i}")[0] for i in range(n)]


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool((a.contiguous().view(as_integers) == b.contiguous().view(as_integers)).all())


def form(output: Any) -> str:
    """The form of a layer's output, such as ``tensor`` or ``tuple(tensor, None)``."""
    if isinstance(output, Tensor) and not output.is_floating_point():
        return "integers"
    if isinstance(output, Tensor):
        return f"tensor {output.ndim}-D" if output.ndim != 3 else "tensor"
    if isinstance(output, dict):
        return f"{type(output).__name__}({', '.join(output)})"
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__}({', '.join(form(item) for item in output)})"
    return "None" if output is None else type(output).__name__


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield place, value.detach().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{place}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{place}[{i}]")


@dataclass
class Truth:
    """What the record shows of a decoder.

    Attributes:
        path, n: the layer list and its length.
        layer_out, layer_in: per layer the state that leaves and enters it; None where none was found by value.
        broken: boundaries where what one layer gives out is not what the next takes in.
        visits: calls of each layer.
        width: the hidden width: that of the embeddings' output.
        norm_path, pre, post: the module that made what the decoder returned, its input and output; None where the
            decoder returns the last layer's state itself.
    """

    path: str
    n: int
    visits: list[int]
    layer_out: list[Tensor | None]
    layer_in: list[Tensor | None]
    broken: list[int]
    output_form: str
    width: int = 0
    norm_path: str | None = None
    pre: Tensor | None = None
    post: Tensor | None = None


def truth_of(recorder: Recorder) -> Truth | None:
    """The decoder that the record shows, or None where no module list has members that feed each other."""
    lists = [(path, m) for path, m in recorder.model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    found = [t for t in (_as_layers(recorder, path, m) for path, m in lists) if t is not None]
    if not found:
        return None
    linked = max(t.n - 1 - len(t.broken) for t in found)
    best = [t for t in found if t.n - 1 - len(t.broken) == linked]
    truth = min(best, key=lambda t: t.path.count("."))
    truth.width = _embedding_width(recorder)
    _find_norm(recorder, truth)
    return truth


def _embedding_width(recorder: Recorder) -> int:
    tables = [c for c in recorder.calls if isinstance(c.module, nn.Embedding) and c.outputs]
    return next(iter(tables[0].outputs.values())).shape[-1] if tables else 0


def _as_layers(recorder: Recorder, path: str, layers: nn.ModuleList) -> Truth | None:
    calls = [recorder.of(f"{path}.{i}") for i in range(len(layers))]
    if any(not c for c in calls):
        calls_that_ran = [c for c in calls if c]
        if len(calls_that_ran) < 2 or len(calls_that_ran) < len(calls) - 1:
            return None
    visits = [len(c) for c in calls]
    first = [c[0] if c else None for c in calls]
    n = len(layers)
    out: list[Tensor | None] = [None] * n
    enter: list[Tensor | None] = [None] * n
    broken, links = [], 0
    for i in range(n - 1):
        a, b = first[i], first[i + 1]
        link = _link(a, b) if a is not None and b is not None else None
        if link is None:
            broken.append(i + 1)
            continue
        links += 1
        out[i], enter[i + 1] = a.outputs[link[0]], b.inputs[link[1]]  # type: ignore[union-attr]
    if not links:
        return None
    places = {_link(first[i], first[i + 1]) for i in range(n - 1) if i + 1 not in broken}  # type: ignore[arg-type]
    (place_out, place_in), *_ = places
    for i in range(n):
        if first[i] is not None:
            out[i] = out[i] if out[i] is not None else first[i].outputs.get(place_out)  # type: ignore[union-attr]
            enter[i] = enter[i] if enter[i] is not None else first[i].inputs.get(place_in)  # type: ignore[union-attr]
    forms = sorted({c.output_form for c in first if c is not None})
    return Truth(path, n, visits, out, enter, broken, " | ".join(forms))


def _link(a: Call, b: Call) -> tuple[str, str] | None:
    """Where a tensor that leaves `a` enters `b`, bit for bit; the first such place."""
    for place_out, left in a.outputs.items():
        for place_in, entered in b.inputs.items():
            if left.ndim >= 3 and equal(left, entered):
                return place_out, place_in
    return None


def _last_hidden_state(recorder: Recorder) -> Tensor | None:
    """What the outermost decoder says is its last hidden state."""
    said = [c for c in recorder.calls if ".last_hidden_state" in c.outputs]
    return min(said, key=lambda c: c.order).outputs[".last_hidden_state"] if said else None


def _find_norm(recorder: Recorder, truth: Truth) -> None:
    """The leaf after the layers that made the last hidden state, unless that is what the last layer gave out."""
    returned, last = _last_hidden_state(recorder), truth.layer_out[-1]
    if returned is None or (last is not None and equal(last, returned)):
        return
    after = max(c.order for i in range(truth.n) for c in recorder.of(f"{truth.path}.{i}"))
    for call in recorder.calls:
        made = next((t for t in call.outputs.values() if equal(t, returned)), None)
        if call.order > after and made is not None and call.inputs and not any(True for _ in call.module.children()):
            truth.norm_path, truth.pre, truth.post = call.path, next(iter(call.inputs.values())), made
            return
