"""One forward of a model without weights, which shows whether its layers can come and go while it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..call import few_ids, without_cache
from ..decoder import Decoder
from ..errors import UsageError


def require_streamable(decoder: Decoder) -> None:
    """Refuse a model whose layers cannot be read one by one, before any weight is read.

    A copy of the model on the meta device is run, so shapes alone are computed; where the model asks for a single value (whether
    a mask is all ones, say), it gets a zero. A model that does not run so stays unjudged here: the proof of its taps, which
    reads weights, finds what this would have found.

    Raises:
        UsageError: a forward changes the weights of a layer, or does not enter the layers from first to last.
    """
    skeleton = copy.deepcopy(decoder.model).eval()  # a forward may leave something in it
    entered: list[int] = []
    versions = []
    for i in range(decoder.n):
        layer = skeleton.get_submodule(decoder.layer_path(i))
        layer.register_forward_pre_hook(_noting(entered, i))
        versions += [(f"{decoder.layer_path(i)}.{name}", p, p._version) for name, p in layer.named_parameters()]
    finished = _runs(skeleton, decoder.vocab_rows)
    changed = next((name for name, parameter, version in versions if parameter._version != version), None)
    if changed is not None:
        raise UsageError(changes_weights(decoder, changed))
    if finished:
        require_order(decoder, entered)


def require_order(decoder: Decoder, entered: Sequence[int]) -> None:
    """Raise UsageError unless `entered`, the layers of one forward, are each later in the decoder than the one before."""
    if any(after <= before for before, after in pairwise(entered)):
        raise UsageError(
            f"{type(decoder.model).__name__} enters its decoder layers in the order {', '.join(map(str, entered))}; weights are "
            "streamed from the first layer to the last, each once. Run it without --stream-weights."
        )


def changes_weights(decoder: Decoder, name: str) -> str:
    """Return what is wrong with a model that changes its own weight `name`."""
    return (
        f"{type(decoder.model).__name__} changes {name} in place while it runs, so its weights cannot be loaded again from the "
        "checkpoint. Run it without --stream-weights."
    )


def _noting(entered: list[int], layer: int) -> Callable[[nn.Module, Any], None]:
    return lambda _module, _args: entered.append(layer)


class _ZeroValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Gives zero for the value of a tensor that has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _runs(skeleton: nn.Module, vocab_rows: int | None) -> bool:
    try:
        with _ZeroValues():  # type: ignore[no-untyped-call]
            skeleton(few_ids(skeleton, vocab_rows, 1, 4), **without_cache(skeleton))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # values decide what it does next
        return False
    return True
