"""Hidden states from a model class itself: `HiddenStateCaptureMixin`, and `with_capture` for a model that already exists.

The mixin overrides ``__call__`` and not ``forward``: accelerate puts a ``forward`` of its own on the instance, which would
hide an override of the class without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from transformers.utils import ModelOutput

from ...models.config import model_config
from ...models.decoder import DecoderNotFoundError, find_decoder
from ...models.default_ids import default_layer_ids
from ...models.errors import UsageError
from ...models.layer_ids import check_layer_ids
from ...models.modules import untraced, untraced_itself
from ...models.pipeline import PipelineGroupLike, pipeline_group_of, require_single_stage
from ..outputs import DeviceHiddenStates
from .call_rows import PLAIN_MASK, CallRows, rows_of_call
from .layer_capture import LayerCapture

Model = TypeVar("Model", bound=nn.Module)

_bookkeeping = untraced("the bookkeeping of a captured call; compile without fullgraph=True")


class HiddenStateCaptureMixin:
    """Add hidden-state capture to a causal language model class: ``class M(HiddenStateCaptureMixin, LlamaForCausalLM)``.

    After one of the setters, each call of the model returns its own output object, unchanged, with two more attributes:
    ``aux_hidden_states``, K tensors (B, S, H) in the model's dtype and the order of the layer ids, and
    ``auxiliary_device_output``, the same rows as a `DeviceHiddenStates`. A call takes its real positions from ``lengths=`` (B,)
    or from its attention mask.

    Where the model itself expands the placeholder of an image into its features (Kimi-K2.5's own code), S counts the expanded
    ids, and the output has two more attributes: ``expanded_input_ids`` (B, S) and ``is_text`` (B, S) bool, False on the rows of
    images.

    Attributes:
        capture_aux_hidden_states: whether calls are captured.
        capture_adapter: the name of the adapter that reads the residual stream where that is not plain; set it before the
            layers. See `models.adapter_names`.
        on_auxiliary_output: None, or a callback that receives the `DeviceHiddenStates` of each captured call once; so once per
            step of ``generate()``.

    Example:
        >>> class Model(HiddenStateCaptureMixin, type(model)):
        ...     pass
        >>> own = Model(model.config)
        >>> own.set_eagle3_layers_to_capture([0, 2])
        >>> [tuple(states.shape) for states in own(torch.tensor([[5, 6, 7]])).aux_hidden_states]
        [(1, 3, 32), (1, 3, 32)]
    """

    capture_aux_hidden_states: bool = False
    capture_adapter: str | None = None
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
        """Return the ``layer_output`` ids that are captured; empty when none are."""
        return [] if self._layer_capture is None else list(self._layer_capture.layer_ids)

    @property
    def last_auxiliary_output(self) -> DeviceHiddenStates | None:
        """Return the `DeviceHiddenStates` of the last captured call."""
        return None if self._layer_capture is None else self._layer_capture.last

    def set_dspark_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """Capture the outputs of these 0-based decoder layers (the whole residual stream, before the final norm).

        Faults are raised in the order in which they are listed.

        Raises:
            PipelineCaptureError (NotImplementedError): more than one pipeline stage.
            DecoderNotFoundError, AdapterError: there are no decoder layers to be found, or no such `capture_adapter`.
            LayerIdError (ValueError), LayerIdTypeError (TypeError): see `models.layer_ids.check_layer_ids`.

        Example:
            >>> _ = with_capture(model)
            >>> model.set_dspark_layers_to_capture([0, 1, 3])
            >>> model.layers_to_capture
            [0, 1, 3]
        """
        self._set_layers("DSPARK", layer_ids)

    def set_dflash_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """Capture these layers as `set_dspark_layers_to_capture` does, for a DFlash draft model; raises the same errors.

        Example:
            >>> _ = with_capture(model)
            >>> model.set_dflash_layers_to_capture([1, 2])
            >>> model.layers_to_capture
            [1, 2]
        """
        self._set_layers("DFLASH", layer_ids)

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None = None) -> None:
        """Capture these layers as `set_dspark_layers_to_capture` does, for an EAGLE-3 draft model; raises the same errors.

        Args:
            layer_ids: None takes the default of EAGLE-3 heads, [1, n//2-1, n-4]; see `models.default_ids`.

        Example:
            >>> _ = with_capture(model)
            >>> model.set_eagle3_layers_to_capture([0, 2])
            >>> model.layers_to_capture
            [0, 2]
        """
        self._set_layers("EAGLE3", layer_ids, default=lambda n: default_layer_ids("eagle3", n))

    def clear_layers_to_capture(self) -> None:
        """Stop capturing and remove every hook and attribute that capturing put on the model; harmless when it has none.

        Example:
            >>> _ = with_capture(model)
            >>> model.set_dflash_layers_to_capture([1, 2])
            >>> model.clear_layers_to_capture()
            >>> model.layers_to_capture, hasattr(model(torch.tensor([[5, 6]])), "aux_hidden_states")
            ([], False)
        """
        if self._layer_capture is not None:
            self._layer_capture.detach(cast(nn.Module, self))
        for name in ("_layer_capture", "capture_aux_hidden_states"):
            self.__dict__.pop(name, None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        prepare = getattr(cls, "prepare_inputs_for_generation", None)
        if prepare is not None:
            cls.prepare_inputs_for_generation = _keeping_plain_mask(prepare)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        if self.capture_aux_hidden_states and not cast(LayerCapture, self._layer_capture).trying:
            return self._captured_call(call, args, kwargs)
        kwargs.pop(PLAIN_MASK, None)
        return call(*args, **kwargs)

    @untraced_itself
    def _captured_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The bookkeeping around the model's own forward stays out of any graph; the forward itself may be compiled.
        capture = cast(LayerCapture, self._layer_capture)
        rows = self._rows_of_call(capture, args, kwargs)
        B, S = rows.positions.B, rows.positions.S
        output, states = capture.forward(lambda: call(*args, **kwargs), B, S)
        return self._with_states(capture, output, states, rows)

    @_bookkeeping
    def _rows_of_call(self, capture: LayerCapture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows:
        if getattr(self, "_is_replica", False):
            raise DecoderNotFoundError(
                "nn.DataParallel is not supported: its replicas share one set of hooks. Run one process a device."
            )
        capture.attach(cast(nn.Module, self))
        config = model_config(cast(nn.Module, self))
        _refuse_tuples(config, kwargs)
        return rows_of_call(args, kwargs, config, capture.cached, capture.company)

    @_bookkeeping
    def _with_states(self, capture: LayerCapture, output: Any, states: tuple[Tensor, ...], rows: CallRows) -> Any:
        if not isinstance(output, ModelOutput):
            raise UsageError(f"a captured call needs a model that returns a ModelOutput; got {type(output).__name__}.")
        made = rows.hidden_states(states)
        capture.last = made
        output.aux_hidden_states = states
        output.auxiliary_device_output = made
        if rows.expansion is not None:
            output.expanded_input_ids, output.is_text = rows.expansion.input_ids, rows.expansion.is_text
        if self.on_auxiliary_output is not None:
            self.on_auxiliary_output(made)
        return output

    def _set_layers(
        self, algorithm: str, layer_ids: Sequence[int] | None, default: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        require_single_stage(self.pp_group, algorithm)
        if not self.pp_group.is_last_rank:
            return
        decoder = find_decoder(cast(nn.Module, self), adapter=self.capture_adapter)
        if layer_ids is None and default is not None:
            layer_ids = default(decoder.n)
        ids = check_layer_ids(layer_ids, decoder.n, algorithm=algorithm)
        self.clear_layers_to_capture()
        self._layer_capture = LayerCapture(ids, self.capture_adapter)
        self._layer_capture.attach(cast(nn.Module, self))
        self.capture_aux_hidden_states = True


def with_capture(model: Model) -> Model:
    """Give `model` the methods of `HiddenStateCaptureMixin` by changing its class in place; return the same object.

    Example:
        >>> _ = with_capture(model)
        >>> model.set_eagle3_layers_to_capture([0, 2])
        >>> model(torch.tensor([[5, 6, 7]])).aux_hidden_states[1].shape
        torch.Size([1, 3, 32])
    """
    if not isinstance(model, HiddenStateCaptureMixin):
        model.__class__ = _capturing_class(type(model))  # type: ignore[assignment, arg-type]
    return model


def without_capture(model: Model) -> Model:
    """Undo `with_capture`: restore hooks, attributes and class; return the same object.

    Example:
        >>> before = type(model)
        >>> type(without_capture(with_capture(model))) is before
        True
    """
    if isinstance(model, HiddenStateCaptureMixin):
        model.clear_layers_to_capture()
        for name in ("on_auxiliary_output", "capture_adapter", "_pp_group"):
            model.__dict__.pop(name, None)
        model.__class__ = getattr(type(model), "_class_without_capture", type(model))
    return model


@functools.cache
def _capturing_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return one class per model class, named as the original: `save_pretrained` writes that name into the config."""
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


def _refuse_tuples(config: Any, kwargs: dict[str, Any]) -> None:
    return_dict = kwargs.get("return_dict")
    if return_dict is None:
        return_dict = getattr(config, "return_dict", True)
    if return_dict is False:
        raise UsageError(
            "return_dict=False cannot be combined with hidden-state capture: the states are attributes of the output object."
        )


def _keeping_plain_mask(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_inputs_for_generation` that keeps the (B, W) mask beside the 4-D one which a compilable cache gets.

    A 4-D mask does not tell padding: rows that attend to nothing are rewritten to attend to everything.
    """

    @functools.wraps(prepare)
    def keeping(self: HiddenStateCaptureMixin, *args: Any, **kwargs: Any) -> Any:
        inputs, mask = prepare(self, *args, **kwargs), kwargs.get("attention_mask")
        if self.capture_aux_hidden_states and isinstance(mask, Tensor) and mask.ndim == 2:
            inputs[PLAIN_MASK] = mask
        return inputs

    return keeping
