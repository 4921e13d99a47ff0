"""One loaded weight of each kind beside what the checkpoint's file means by it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .dequantization import dequantized, quantized_modules
from .published_form import PublishedForm, PublishedFormError
from .stored_tensors import place

# The two opinions may round at other places: float32 products against products of the stored scales' own dtype.
_ROUNDINGS = 2


def require_dequantized(model: nn.Module, form: PublishedForm, name: str) -> None:
    """Compare one dequantized weight of each kind with its own dequantization from the file.

    Weights that stay quantized in memory, and layouts that `dequantized` does not know, are not compared.

    Raises:
        PublishedFormError: a weight is another one.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_place: dict[str, list[str]] = {}
    for full in parameters:
        by_place.setdefault(place(full), []).append(full)
    for module in _one_of_each_kind(form):
        candidates = list(_candidates(f"{module}.weight", parameters, by_place))
        expected = dequantized(form.tensors, module, form.fields) if candidates else None
        if expected is None:
            continue
        alike = [c for c in candidates if expected.shape in (c.shape, c.shape[::-1])]
        if alike and not any(_same(c, expected) for c in alike):
            raise PublishedFormError(
                f"{name}: {module}.weight was loaded as another weight than its file means by it ({form}); "
                f"{_furthest(alike, expected):.2g} away where the largest weight is {float(expected.abs().max()):.2g}. "
                "This version of transformers reads the form wrongly: take the unquantized release."
            )


def _one_of_each_kind(form: PublishedForm) -> Iterator[str]:
    seen = set()
    for module in quantized_modules(form.tensors):
        kind = (
            re.sub(r"\d+", "*", module),
            tuple(form.tensors[n].shape for n in (f"{module}.weight",) if n in form.tensors),
        )
        if kind not in seen:
            seen.add(kind)
            yield module


def _candidates(name: str, parameters: dict[str, nn.Parameter], by_place: dict[str, list[str]]) -> Iterator[Tensor]:
    """Yield the parameters that may be the weight called `name`, each (rows, columns): its own, or parts of fused experts."""
    own = by_place.get(place(name), [])
    found = [parameters[full] for full in own if _is_plain(parameters[full])]
    if len(own) == 1 and found:
        yield from found
        return
    expert = re.search(r"^(.*?)\.experts\.(\d+)\.[^.]+\.weight$", place(name))
    if expert is None or own:
        return
    layer = ".".join(expert[1].split(".")[:2])
    for full, parameter in parameters.items():
        if (
            parameter.ndim == 3
            and _is_plain(parameter)
            and f".{layer}." in f".{full}"
            and int(expert[2]) < len(parameter)
        ):
            yield from _parts(parameter[int(expert[2])])


def _parts(fused: Tensor) -> Iterator[Tensor]:
    """Yield one expert's matrix whole, and as two matrices side by side or interleaved, along either dimension."""
    yield fused
    for matrix in (fused, fused.T):
        half = len(matrix) // 2
        yield from (matrix[:half], matrix[half:], matrix[::2], matrix[1::2])


def _is_plain(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.element_size() > 1 and parameter.device.type != "meta"


def _same(loaded: Tensor, expected: Tensor) -> bool:
    bound = _ROUNDINGS * torch.finfo(loaded.dtype).eps
    allowed = bound * expected.abs() + torch.finfo(loaded.dtype).tiny
    return any(bool((distance <= allowed).all()) for distance in _distances(loaded, expected))


def _furthest(loaded: list[Tensor], expected: Tensor) -> float:
    return min(float(distance.max()) for one in loaded for distance in _distances(one, expected))


def _distances(loaded: Tensor, expected: Tensor) -> Iterator[Tensor]:
    """Return the distances from `expected` of the matrix, and of its transpose, if they have its shape."""
    for matrix in (loaded, loaded.T):
        if matrix.shape == expected.shape:
            yield (matrix.detach().float().cpu() - expected).abs()
