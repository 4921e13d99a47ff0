"""The hooks of one set of taps: attached to a model once, armed for one forward at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..models.adapters import Adapter
from ..models.decoder import Decoder
from ..models.modules import untraced
from .errors import TapError
from .residual import entering, entering_norm, leaving, leaving_norm
from .slots import Slots
from .taps import Taps


class StopForward(Exception):  # noqa: N818 - a signal, and an Exception so that FSDP2's clean-up hooks run
    """Ends a forward whose later values nobody wants; only the collector that raised it may swallow it."""

    def __init__(self, owner: Collector) -> None:
        super().__init__("the forward was stopped after its last tap")
        self.owner = owner


# Traced hooks would become part of graphs that outlive them, or be missed by graphs that are older; so each breaks its graph.
_untraced = untraced("hiddentap copies a state here; compile without fullgraph=True")


class TapHook:
    """One tap's hook. A copy of it (deepcopy, pickle) is inert: it belongs to no collector and does nothing."""

    def __init__(self, collector: Collector | None, slot: int, where: str) -> None:
        self._collector, self._slot, self._where = collector, slot, where

    @property
    def inert(self) -> bool:
        return self._collector is None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(None, self._slot, self._where)

    def __reduce__(self) -> tuple[type[Self], tuple[None, int, str]]:
        return type(self), (None, self._slot, self._where)


def drop_inert_hooks(model: nn.Module) -> None:
    """Remove the hooks that came along when a tapped model was copied."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(hook, TapHook) and hook.inert]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


class OutputHook(TapHook):
    """Takes the residual stream from a decoder layer's output."""

    @_untraced
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._collector is not None and self._collector.hears(self._where):
            self._collector.receive(self._slot, leaving(self._collector.adapter, output, self._where))


class InputHook(TapHook):
    """Takes the residual stream from the arguments of a decoder layer."""

    @_untraced
    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self._collector is not None and self._collector.hears(self._where):
            self._collector.receive(self._slot, entering(self._collector.adapter, args, kwargs or {}, self._where))


class LastLayerHook(TapHook):
    """Marks that the last decoder layer ran: some models also use their final norm before the layers."""

    @_untraced
    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._collector is not None and self._collector.listening:
            self._collector.layers_done()


class NormOutputHook(TapHook):
    """Takes what leaves the final norm after the last layer."""

    @_untraced
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._collector is not None and self._collector.after_layers:
            self._collector.receive(self._slot, leaving_norm(output))


class NormInputHook(TapHook):
    """Takes what enters the final norm after the last layer."""

    @_untraced
    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self._collector is not None and self._collector.after_layers:
            self._collector.receive(self._slot, entering_norm(self._collector.adapter, args, kwargs or {}, self._where))


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass
class _Forward:
    """State of one armed forward; `seen` holds shape and dtype of each tap's first state."""

    slots: Slots
    B: int
    S: int
    stop: bool
    fired: list[int]
    layers_done: bool = False
    seen: dict[int, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return all(self.fired)


class Collector:
    """Hooks on the modules that `taps` name.

    The state of an armed forward is kept per thread: two threads that run one model each get their own values, and a
    forward that nobody armed leaves no trace. A firing inside backward (activation checkpointing runs layers again) is
    ignored.
    """

    def __init__(
        self, decoder: Decoder, taps: Taps, norm: nn.Module | None = None, *, every_forward: bool = False
    ) -> None:
        """Make hooks that are on no module yet.

        norm: the final norm; needed when `taps` ask for its states.
        every_forward: while attached, every forward of a tapped layer must be collected: one that is not is an error.
        """
        self.taps = taps
        self._decoder, self._norm, self._every_forward = decoder, norm, every_forward
        self._handles: list[RemovableHandle] = []
        self._local = threading.local()

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        """Register the hooks, last on each module, so that they see what the next module sees."""
        if self.attached:
            return
        for slot, b in enumerate(self.taps.boundaries):
            site = self._decoder.site(b)
            if site.at_input:
                hook = InputHook(self, slot, site.path)
                self._handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(site.module.register_forward_hook(OutputHook(self, slot, site.path)))
        if self.taps.final != "none":
            self._attach_norm(self._final_norm(), first_slot=len(self.taps.boundaries))

    def _attach_norm(self, norm: nn.Module, first_slot: int) -> None:
        where = "the final norm"
        self._handles.append(self._decoder.layers[-1].register_forward_hook(LastLayerHook(self, -1, where)))
        if self.taps.pre_norm:
            pre = NormInputHook(self, first_slot, where)
            self._handles.append(norm.register_forward_pre_hook(pre, with_kwargs=True))
        if self.taps.post_norm:
            post = NormOutputHook(self, first_slot + self.taps.pre_norm, where)
            self._handles.append(norm.register_forward_hook(post))

    def detach(self) -> None:
        """Remove the hooks; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def adapter(self) -> Adapter | None:
        return self._decoder.adapter

    @property
    def listening(self) -> bool:
        return getattr(self._local, "forward", None) is not None

    def hears(self, where: str) -> bool:
        """Return whether a state that `where` shows now is to be taken.

        Raises:
            TapError: it is not, though every forward is to be collected.
        """
        if self.is_ignoring:
            return False
        if self.listening:
            return True
        if self._every_forward and not _inside_backward():
            raise TapError(
                f"{where} of {type(self._decoder.model).__name__} ran while capture is on, but not in a call of that model "
                "itself, so its states would be lost. Wrappers (peft, torch.compile, a base model, generate() of an inner model) "
                "reach the layers by another way: turn capture on for the module whose call reaches them (of a PeftModel "
                "get_base_model() for generate()), wrap it after with_capture, or stop capturing with clear_layers_to_capture()."
            )
        return False

    @property
    def is_ignoring(self) -> bool:
        return getattr(self._local, "ignoring", False)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Let forwards of this thread pass uncollected inside the block."""
        before = getattr(self._local, "ignoring", False)
        self._local.ignoring = True
        try:
            yield
        finally:
            self._local.ignoring = before

    @property
    def after_layers(self) -> bool:
        """Return whether the armed forward has passed its last decoder layer."""
        return self.listening and self._local.forward.layers_done

    def layers_done(self) -> None:
        self._local.forward.layers_done = True

    @contextmanager
    def armed(self, slots: Slots, B: int, S: int, *, stop: bool = False) -> Iterator[None]:
        """Collect one forward over a (B, S) batch into `slots`; with `stop`, end it once every tap has fired.

        Raises:
            TapError: on leaving, if a tap did not fire exactly once with a floating (B, S, H) tensor of one dtype.
        """
        if self.listening:
            raise TapError(
                "a captured forward of these taps is already under way in this thread; they cannot be nested."
            )
        self._come_last()
        forward = _Forward(slots, B, S, stop, [0] * len(self.taps.names))
        self._local.forward = forward
        try:
            yield
        except StopForward as signal:
            if signal.owner is not self:
                raise
        finally:
            self._local.forward = None
        self._check(forward)

    @contextmanager
    def set_aside(self) -> Iterator[tuple[Tensor, ...]]:
        """Pause the armed forward inside the block, where others may be armed in this thread; yield what its taps hold."""
        forward, self._local.forward = getattr(self._local, "forward", None), None
        try:
            yield () if forward is None else forward.slots.held
        finally:
            self._local.forward = forward

    def _come_last(self) -> None:
        """Put the hooks behind those that were registered after them: what those change is what the next module sees."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)

    def receive(self, slot: int, state: Tensor) -> None:
        """Take the state of one tap; called by the hooks while armed."""
        if _inside_backward():
            return
        forward: _Forward = self._local.forward
        forward.fired[slot] += 1
        if forward.fired[slot] > 1:
            return
        forward.seen[slot] = (state.shape, state.dtype)
        if self._fits(forward, slot, state.shape, state.dtype):
            forward.slots.store(slot, state)
        if forward.stop and forward.finished:
            raise StopForward(self)

    def _fits(self, forward: _Forward, slot: int, shape: torch.Size, dtype: torch.dtype) -> bool:
        return (
            len(shape) == 3
            and tuple(shape[:2]) == (forward.B, forward.S)
            and self._has_width(slot, shape[2])
            and dtype.is_floating_point
        )

    def _has_width(self, slot: int, width: int) -> bool:
        if slot < len(self.taps.boundaries):
            return self._decoder.has_width(width)
        return not self._decoder.widths or width in self._decoder.widths

    def _misfit(self, forward: _Forward, slot: int, shape: torch.Size, dtype: torch.dtype) -> str:
        fewer = len(shape) == 3 and shape[0] == forward.B and shape[1] < forward.S
        kept = " Some models keep only the positions whose logits are wanted: in generate(), say logits_to_keep=0."
        return (
            f"{self.taps.names[slot]} gave a {str(dtype).removeprefix('torch.')} tensor {tuple(shape)}; expected a floating "
            f"tensor ({forward.B}, {forward.S}, H) with H in {sorted(self._decoder.widths)}, one row for each token of each "
            f"sequence.{kept if fewer else ''}"
        )

    def _final_norm(self) -> nn.Module:
        if self._norm is None:
            raise TapError("norm states were asked for, but no final norm was found in this model.")
        return self._norm

    def _check(self, forward: _Forward) -> None:
        silent = [name for name, count in zip(self.taps.names, forward.fired, strict=True) if count == 0]
        if silent:
            raise TapError(
                f"{', '.join(silent)} of {type(self._decoder.model).__name__} did not fire in this forward. If the model was "
                "compiled before the taps were attached, attach them first, call torch._dynamo.reset(), or run under "
                'torch.compiler.set_stance("force_eager"); otherwise the model skips these layers for this input.'
            )
        again = [name for name, count in zip(self.taps.names, forward.fired, strict=True) if count > 1]
        if again:
            raise TapError(
                f"{', '.join(again)} fired {max(forward.fired)} times in one forward: the model runs these layers in a loop, "
                "so one layer id names several states, and none of them is taken."
            )
        for slot, (shape, dtype) in forward.seen.items():
            if not self._fits(forward, slot, shape, dtype):
                raise TapError(self._misfit(forward, slot, shape, dtype))
        dtypes = {dtype for _, dtype in forward.seen.values()}
        if len(dtypes) > 1:
            raise TapError(
                f"the taps gave different dtypes {sorted(str(d) for d in dtypes)}: attach them after mixed-precision "
                "wrappers, so that all see the same side of the casts."
            )
