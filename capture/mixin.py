"""Hidden states from a model class itself: `HiddenStateCaptureMixin`, and `with_capture` for a model that already exists.

The mixin overrides ``__call__`` and not ``forward``: accelerate puts a ``forward`` of its own on the instance, which would
hide an override of the class without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..hooks import ClonedStates, Collector, RealPositions, Taps, Watch, drop_inert_hooks, lone_pad_id, real_positions
from ..models.call import cache_in
from ..models.decoder import Decoder, find_decoder
from ..models.errors import UsageError
from ..models.layer_ids import check_layer_ids, default_layer_ids
from ..models.pipeline import PipelineGroupLike, pipeline_group_of
from .outputs import DeviceHiddenStates, RowLayout

Model = TypeVar("Model", bound=nn.Module)


class PipelineCaptureError(UsageError, NotImplementedError):
    """Hidden states were asked of one stage of several."""


def require_single_stage(group: PipelineGroupLike, algorithm: str) -> None:
    """Raise PipelineCaptureError where `group` has more than one pipeline stage."""
    if group.world_size > 1:
        raise PipelineCaptureError(f"{algorithm} aux hidden capture requires PP=1.")


class LayerCapture:
    """The taps that a mixin model carries; a copy of the model (deepcopy, pickle) carries them on, attached anew."""

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = list(layer_ids)
        self.last: DeviceHiddenStates | None = None
        self._decoder: Decoder | None = None
        self._collector: Collector | None = None
        self._checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCapture:
        return LayerCapture(self.layer_ids)

    def __reduce__(self) -> tuple[type[LayerCapture], tuple[list[int]]]:
        return LayerCapture, (self.layer_ids,)

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on `model`'s layers, unless they are there; those of a model it was copied from go."""
        if self._collector is None:
            drop_inert_hooks(model)
            self._decoder = find_decoder(model)
            self._collector = Collector(self._decoder, Taps(tuple(i + 1 for i in self.layer_ids)))
        self._collector.attach()

    def detach(self, model: nn.Module) -> None:
        drop_inert_hooks(model)
        if self._collector is not None:
            self._collector.detach()

    def forward(self, call: Callable[[], Any], B: int, S: int) -> tuple[Any, tuple[Tensor, ...]]:
        """One captured call: the model's own output and K states (B, S, H)."""
        decoder, collector = cast(Decoder, self._decoder), cast(Collector, self._collector)
        slots = ClonedStates(len(self.layer_ids))
        with collector.armed(slots, B, S):
            output = call() if self._checked else self._watched(call, decoder)
        return output, tuple(state for state in slots.states if state is not None)

    def _watched(self, call: Callable[[], Any], decoder: Decoder) -> Any:
        watch = Watch(decoder)
        with watch.watching():
            output = call()
        watch.truth().require(decoder, tuple(i + 1 for i in self.layer_ids))
        self._checked = True
        return output


class HiddenStateCaptureMixin:
    """Adds hidden-state capture to a causal language model class: ``class M(HiddenStateCaptureMixin, LlamaForCausalLM)``.

    After one of the setters, each call of the model returns its own output object, unchanged, with two more attributes:
    ``aux_hidden_states``, K tensors (B, S, H) in the order of the layer ids, and ``auxiliary_device_output``, the same rows as a
    `DeviceHiddenStates`. A call may say which positions are real by ``lengths=`` (B,) or by its attention mask.

    Attributes:
        capture_aux_hidden_states: whether calls are captured.
        on_auxiliary_output: None, or a callable that is given the `DeviceHiddenStates` of each captured call once; so once
            per step of ``generate()``.
    """

    capture_aux_hidden_states: bool = False
    on_auxiliary_output: Callable[[DeviceHiddenStates], None] | None = None
    _layer_capture: LayerCapture | None = None
    _pp_group: PipelineGroupLike | None = None

    @property
    def pp_group(self) -> PipelineGroupLike:
        """This process among pipeline stages: what was assigned, else from the model's device mesh, else one stage."""
        return self._pp_group if self._pp_group is not None else pipeline_group_of(cast(nn.Module, self))

    @pp_group.setter
    def pp_group(self, group: PipelineGroupLike | None) -> None:
        self._pp_group = group

    @property
    def layers_to_capture(self) -> list[int]:
        """The ``layer_output`` ids that are captured; empty when none are."""
        return [] if self._layer_capture is None else list(self._layer_capture.layer_ids)

    @property
    def last_auxiliary_output(self) -> DeviceHiddenStates | None:
        """The `DeviceHiddenStates` of the last captured call."""
        return None if self._layer_capture is None else self._layer_capture.last

    def set_dspark_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """Capture the outputs of these 0-based decoder layers (the whole residual stream, before the final norm).

        Raises, in this order:
            PipelineCaptureError (NotImplementedError): more than one pipeline stage.
            LayerIdError (ValueError), LayerIdTypeError (TypeError): see `models.layer_ids.check_layer_ids`.
        """
        self._set_layers("DSPARK", layer_ids)

    def set_dflash_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """As `set_dspark_layers_to_capture`, for a DFlash drafter."""
        self._set_layers("DFLASH", layer_ids)

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None = None) -> None:
        """As `set_dspark_layers_to_capture`, for an EAGLE-3 drafter; None takes [1, n//2-1, n-4]."""
        self._set_layers("EAGLE3", layer_ids, default=lambda n: default_layer_ids("eagle3", n))

    def clear_layers_to_capture(self) -> None:
        """Stop capturing and remove every hook and attribute that capturing put on the model; harmless when it has none."""
        if self._layer_capture is not None:
            self._layer_capture.detach(cast(nn.Module, self))
        for name in ("_layer_capture", "capture_aux_hidden_states"):
            self.__dict__.pop(name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        if not self.capture_aux_hidden_states:
            return call(*args, **kwargs)
        capture = cast(LayerCapture, self._layer_capture)
        capture.attach(cast(nn.Module, self))
        lengths = kwargs.pop("lengths", None)
        ids, (B, S) = _batch(args, kwargs)
        self._refuse_tuples(kwargs)
        mask, pad = kwargs.get("attention_mask"), lone_pad_id(getattr(self, "config", None))
        positions = real_positions(ids, B, S, lengths=lengths, attention_mask=mask, lone_pad_id=pad)
        before = _positions_before(kwargs, B, S)
        output, states = capture.forward(lambda: call(*args, **kwargs), B, S)
        if not isinstance(output, ModelOutput):
            raise UsageError(f"a captured call needs a model that returns a ModelOutput; got {type(output).__name__}.")
        capture.last = _device_hidden_states(states, positions, before)
        output.aux_hidden_states = states
        output.auxiliary_device_output = capture.last
        if self.on_auxiliary_output is not None:
            self.on_auxiliary_output(capture.last)
        return output

    def _set_layers(
        self, algorithm: str, layer_ids: Sequence[int] | None, default: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        require_single_stage(self.pp_group, algorithm)
        if not self.pp_group.is_last_rank:
            return
        n = find_decoder(cast(nn.Module, self)).n
        if layer_ids is None and default is not None:
            layer_ids = default(n)
        ids = check_layer_ids(layer_ids, n, algorithm=algorithm)
        self.clear_layers_to_capture()
        self._layer_capture = LayerCapture(ids)
        self._layer_capture.attach(cast(nn.Module, self))
        self.capture_aux_hidden_states = True

    def _refuse_tuples(self, kwargs: dict[str, Any]) -> None:
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = getattr(getattr(self, "config", None), "return_dict", True)
        if return_dict is False:
            raise UsageError(
                "return_dict=False cannot be combined with hidden-state capture: the states are attributes of the output object."
            )


def with_capture(model: Model) -> Model:
    """Give `model` the abilities of `HiddenStateCaptureMixin`, in place, by changing its class; returns the same object."""
    if not isinstance(model, HiddenStateCaptureMixin):
        model.__class__ = _capturing_class(type(model))  # type: ignore[assignment, arg-type]
    return model


def without_capture(model: Model) -> Model:
    """Undo `with_capture`: hooks, attributes and class are as they were; returns the same object."""
    if isinstance(model, HiddenStateCaptureMixin):
        model.clear_layers_to_capture()
        for name in ("on_auxiliary_output", "_pp_group"):
            model.__dict__.pop(name, None)
        model.__class__ = getattr(type(model), "_class_without_capture", type(model))
    return model


@functools.cache
def _capturing_class(original: type[nn.Module]) -> type[nn.Module]:
    """One class per model class, named as the original: `save_pretrained` writes that name into the config."""
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "_class_without_capture": original,
    }
    return type(original.__name__, (HiddenStateCaptureMixin, original), members)


def _reduce(model: nn.Module, _protocol: int) -> Any:
    # The class itself cannot be found by name, so a pickle names the original and swaps again on loading.
    return _new_capturing, (cast(Any, type(model))._class_without_capture,), model.__dict__


def _new_capturing(original: type[nn.Module]) -> nn.Module:
    cls = _capturing_class(original)  # type: ignore[arg-type]
    return cls.__new__(cls)


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, tuple[int, int]]:
    ids = args[0] if args else kwargs.get("input_ids")
    source = ids if ids is not None else kwargs.get("inputs_embeds")
    if not isinstance(source, Tensor) or source.ndim < 2:
        raise UsageError("a captured call needs input_ids (B, S) or inputs_embeds (B, S, H).")
    return ids, (int(source.shape[0]), int(source.shape[1]))


def _positions_before(kwargs: dict[str, Any], B: int, S: int) -> tuple[int, ...]:
    """How many real positions of each row the cache holds already. To be asked before the call, which fills the cache."""
    cache = cache_in(kwargs)
    held = int(cache.get_seq_length()) if cache is not None else 0
    mask = kwargs.get("attention_mask")
    if held and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == held + S:
        return tuple((mask[:, :held] != 0).sum(1).tolist())
    return (held,) * B


@torch.no_grad()
def _device_hidden_states(
    states: tuple[Tensor, ...], positions: RealPositions, before: tuple[int, ...]
) -> DeviceHiddenStates:
    flat = [state.detach().reshape(-1, state.shape[-1]) for state in states]
    rows = torch.stack([state.to(flat[0].device) for state in flat], 1)
    if not positions.all_real:
        rows = rows.index_select(0, positions.flat_index().to(rows.device))
    # Rows that follow a cache were sampled or are a later chunk; whoever runs a chunked prefill counts them as prompt itself.
    prompt = tuple(length if held == 0 else 0 for length, held in zip(positions.lengths, before, strict=True))
    return DeviceHiddenStates({"aux_hidden_states": rows}, RowLayout(positions.lengths, before, prompt))
