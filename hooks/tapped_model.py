"""A model with taps on it: found, proven on one forward, ready to be collected from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..models.config import model_config, model_types
from ..models.decoder import Decoder, find_decoder
from ..models.layer_choice import LayerChoice
from ..models.length_limits import LengthLimits, length_limits
from ..models.loading import load_config, model_skeleton
from ..models.model_source import ModelLoadError, ModelSource
from ..models.pipeline import pipeline_group_of, require_single_stage
from .collector import Collector
from .company import Company
from .company_probe import AtOnce, one_after_the_other
from .errors import TapError
from .taps import Final, Taps
from .truth import FinalNorm, Truth, probe

# What code that comes with a model may raise when it is built without memory for its weights.
_UNBUILDABLE = (ModelLoadError, AttributeError, TypeError, LookupError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class TappedModel:
    """A model whose taps were proven.

    Attributes:
        decoder: where its layers are, and how the residual stream is read.
        taps: what is taken.
        norm: the final norm, or None where the model has none.
        hidden_size: H of the boundaries.
        dtype: the dtype that the layers compute in.
        collector: the hooks of `taps`; `attached` puts them on the model.
        limits: lengths at which rows change with their company.
        company: what is found of rows in company, when it is first asked.
    """

    decoder: Decoder
    taps: Taps
    norm: FinalNorm | None
    hidden_size: int
    dtype: torch.dtype
    collector: Collector
    limits: LengthLimits
    company: Company

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: LayerChoice | None,
        final: Final = "none",
        *,
        adapter: str | None = None,
        at_once: AtOnce = one_after_the_other,
    ) -> TappedModel:
        """Find the layers of `model`, run it once on a few tokens, and prove the taps by what that forward showed.

        No hook stays on the model.

        Args:
            layers: the layers to tap, or None for no boundary at all.
            final: norm states to take too.
            adapter: how the residual stream is read where it is not plain; see `models.adapters`.
            at_once: see `Company`.

        Raises:
            PipelineCaptureError: the model is one stage of several.
            DecoderNotFoundError, AdapterError: its layers, or the adapter, are not to be had.
            LayerIdError, LayerIdTypeError, DraftConfigError: `layers` name no layers of this model.
            TapError: a tap is not true, or a norm is asked for that the model does not have.
        """
        decoder, taps = find_taps(model, layers, final, adapter=adapter)
        return cls.proven(decoder, taps, probe(decoder), at_once)

    @classmethod
    def proven(cls, decoder: Decoder, taps: Taps, truth: Truth, at_once: AtOnce = one_after_the_other) -> TappedModel:
        """Make one of what a watched forward showed; raises TapError where that speaks against a tap."""
        truth.require(decoder, taps.boundaries)
        norm = truth.require_norm(decoder) if taps.final != "none" else truth.norm
        if truth.hidden_size is None or truth.dtype is None:
            raise TapError(f"no decoder layer of {type(decoder.model).__name__} gave a hidden state when it was tried.")
        collector = Collector(decoder, taps, norm.module if norm else None)
        limits = length_limits(decoder.model)
        company = Company(decoder, collector, limits, at_once=at_once)
        return cls(decoder, taps, norm, truth.hidden_size, truth.dtype, collector, limits, company)

    @property
    def model(self) -> nn.Module:
        return self.decoder.model

    @property
    def norm_path(self) -> str | None:
        return self.norm.path if self.norm else None

    @property
    def norm_size(self) -> int:
        """Width of the norm states; H differs from it where an adapter keeps several streams side by side."""
        return self.norm.hidden_size if self.norm else self.hidden_size

    @contextmanager
    def attached(self) -> Iterator[Collector]:
        """Keep the hooks on the model inside the block alone."""
        self.collector.attach()
        try:
            yield self.collector
        finally:
            self.collector.detach()


def find_taps(
    model: nn.Module, layers: LayerChoice | None, final: Final = "none", *, adapter: str | None = None
) -> tuple[Decoder, Taps]:
    """Find the decoder of `model` and the taps that `layers` name in it; runs nothing, so a skeleton will do.

    Raises:
        PipelineCaptureError, DecoderNotFoundError, AdapterError, LayerIdError, LayerIdTypeError, DraftConfigError: as
            `TappedModel.of`.
    """
    require_single_stage(
        getattr(model, "pp_group", None) or pipeline_group_of(model), layers.called if layers else "DSPARK"
    )
    decoder = find_decoder(model, adapter=adapter)
    return decoder, Taps(
        () if layers is None else layers.boundaries(decoder.n, model_types(model_config(model))), final
    )


def find_taps_without_weights(
    source: ModelSource, layers: LayerChoice | None, final: Final = "none", *, adapter: str | None = None
) -> tuple[Decoder, Taps] | None:
    """Find what `find_taps` finds in the model's skeleton on the meta device: before its weights are read.

    None where the model cannot be built without its weights.

    Raises:
        ModelLoadError: there is no such model, or it needs remote code that was not allowed. The others as `find_taps`.
    """
    load_config(source)
    try:
        skeleton = model_skeleton(source)
    except _UNBUILDABLE:
        return None
    return find_taps(skeleton, layers, final, adapter=adapter)
