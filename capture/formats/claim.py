"""The claim of an import about its rows: which layers, of which model, by whose word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models.checkpoint import config_hash, fingerprint
from ...models.decoder import find_decoder
from ...models.layer_ids import Convention, from_boundaries, to_boundaries
from ...models.loading import load_config, model_skeleton
from ...models.model_source import ModelSource
from ..store import TapsDescription
from .errors import FormatError
from .layout import Stated
from .settings import ImportSettings
from .taps import EMBEDDINGS, EMBEDDINGS_ID


@dataclass(frozen=True)
class Claim:
    """The K boundaries in slot order, of n layers; `model` and `layers_path` where they are known.

    Attributes:
        width: H as the model's own config states it, None without a model.
        compute_dtype: how the rows were computed; None where nothing says it.
    """

    boundaries: tuple[int, ...]
    n: int
    convention: Convention
    model: Mapping[str, Any] = field(default_factory=dict)
    layers_path: str | None = None
    width: int | None = None
    compute_dtype: str | None = None

    @property
    def K(self) -> int:
        return len(self.boundaries)

    def taps(self, H: int, final: str) -> dict[str, Any]:
        """Return the taps for the shards' headers."""
        # Under the other convention no id names the embeddings.
        convention: Convention = "boundary" if EMBEDDINGS in self.boundaries else self.convention
        ids = tuple(from_boundaries(self.boundaries, convention))
        taps = TapsDescription(convention, ids, self.boundaries, final, self.n, H, self.layers_path)
        # How layers were read, nothing says that an import reads: the header is silent about it.
        return {name: value for name, value in taps.as_json().items() if name != "adapter"}


def claim_of(settings: ImportSettings, stated: Stated, record: Mapping[str, Any] | None) -> Claim:
    """Return the claim of the settings, else of the files, else of the record that our own export left beside them.

    Raises:
        FormatError: nothing says how many layers the model has, or which were captured.
        LayerIdError: ids that name no set of layers.
        ModelLoadError: a model that cannot be found.
    """
    ours: Mapping[str, Any] = record["identity"] if record else {}
    known = _of_model(settings) if settings.model else {}
    taps: Mapping[str, Any] = ours.get("taps") or {}
    n = settings.n or known.get("n") or stated.n or taps.get("num_hidden_layers")
    if n is None:
        raise FormatError("nothing says how many decoder layers the model has; give --model M, or --n N.")
    convention: Convention = settings.convention or stated.convention
    return Claim(
        boundaries=_boundaries(settings, stated, taps, n, convention),
        n=n,
        convention=convention,
        model=known.get("model") or ours.get("model") or {"id": stated.model, "class": None},
        layers_path=known.get("layers_path") or taps.get("layers_path"),
        width=known.get("width") or taps.get("hidden_size"),
        compute_dtype=ours.get("compute_dtype"),
    )


def _boundaries(
    settings: ImportSettings, stated: Stated, taps: Mapping[str, Any], n: int, convention: Convention
) -> tuple[int, ...]:
    ids = settings.layer_ids if settings.layer_ids is not None else stated.layer_ids
    if ids is None and "boundaries" in taps:
        return tuple(taps["boundaries"])
    if ids is None:
        raise FormatError(
            "the files do not say which layers they hold; give --layer-ids I,J,... as the dump's maker was told "
            "(and --convention boundary where the ids count states instead of layer outputs)."
        )
    if not ids:
        return ()
    outputs = ids[1:] if convention == "layer_output" and ids[0] == EMBEDDINGS_ID else ids
    embeddings = (EMBEDDINGS,) if len(outputs) < len(ids) else ()
    return (*embeddings, *(to_boundaries(outputs, n, convention) if outputs else ()))


def _of_model(settings: ImportSettings) -> dict[str, Any]:
    source = ModelSource(str(settings.model), settings.revision, trust_remote_code=settings.trust_remote_code)
    skeleton = model_skeleton(source)
    decoder, config, folder = find_decoder(skeleton), load_config(source), Path(source.name)
    return {
        "n": decoder.n,
        "layers_path": decoder.layers_path,
        "width": max(decoder.widths) if len(decoder.widths) == 1 else None,
        "model": {
            "id": source.name,
            "revision": getattr(config, "_commit_hash", None),
            "class": type(skeleton).__name__,
            "config_sha256": config_hash(config),
            "weights_sha256": fingerprint(folder) if folder.is_dir() else None,
        },
    }
