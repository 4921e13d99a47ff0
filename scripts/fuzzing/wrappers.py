"""What stands around a model when it is captured: nothing, or one of the modules that people put there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .oracle import Unrunnable


class Holder(nn.Module):
    """A module of somebody's own that holds a model and passes everything on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@dataclass(frozen=True)
class Wrapper:
    """One way to wrap.

    Attributes:
        wrap: the wrapper around a model.
        captured: which of the two capture is asked of; the outer one is called.
        first: whether the model is wrapped or captured first.
        generates: whether the outer one has `generate`.
        weight: how often it is drawn; compilation takes ten seconds.
    """

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    captured: Literal["outer", "inner"] = "outer"
    first: Literal["wrap", "capture"] = "wrap"
    generates: bool = True
    weight: int = 6


def _compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _with_lora(model: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(11)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    try:
        return peft.get_peft_model(model, config)
    except ValueError as refused:  # peft's own: some projections of Mamba take no adapter
        raise Unrunnable(f"peft: {refused}") from refused


def _replica(model: nn.Module) -> nn.Module:
    return model._replicate_for_data_parallel()


WRAPPERS: dict[str, Wrapper] = {
    wrapper.name: wrapper
    for wrapper in (
        Wrapper("none", lambda model: model),
        Wrapper("compiled", _compiled, weight=1),
        Wrapper("inside compiled", _compiled, "inner", weight=1),
        Wrapper("then compiled", _compiled, "inner", "capture", weight=1),
        Wrapper("LoRA", _with_lora),
        Wrapper("inside LoRA", _with_lora, "inner"),
        Wrapper("data parallel", nn.DataParallel, generates=False),
        Wrapper("inside data parallel", nn.DataParallel, "inner", generates=False),
        Wrapper("replica", _replica, "inner", "capture", generates=False),
        Wrapper("module", Holder, generates=False),
        Wrapper("inside module", Holder, "inner", generates=False),
    )
}
