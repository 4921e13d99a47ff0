"""What a benchmark is run with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hiddentap.capture.run import CaptureSettings
from hiddentap.models.choices import CpuFastPaths
from hiddentap.models.loaded_model import LoadedModel
from hiddentap.models.loading import load_config, load_model
from hiddentap.models.model_source import ModelSource

# A run of any length seals behind its forward; only the last shard's seal is waited for. Four shards keep that small.
SHARDS = 4


@dataclass(frozen=True)
class Setting:
    """The model, the layers (0-based), how often and how long, and where the files go.

    `seconds`: about the time of one eager run; `others_every`: in which rounds other tools' strategies take part;
    `batch_tokens`: the budget of positions, None for what a run finds. `dtype`: of every contender, ``auto``: as the config
    says. `attention`: of hiddentap's run and of the floor, None for what transformers chooses, as the other tools have it.
    `cpu_fast_paths`: of hiddentap's run and of the floor. `data_sets`: of the speed section.
    """

    model: str
    layers: tuple[int, ...] | None
    rounds: int
    seconds: float
    others_every: int
    batch_tokens: int | None
    dtype: str
    attention: str | None
    cpu_fast_paths: CpuFastPaths
    data_sets: tuple[str, ...]
    folder: Path
    quick: bool
    device: str = "auto"

    @property
    def source(self) -> ModelSource:
        return ModelSource(self.model, dtype=self.dtype, device=self.device, attn_implementation=self.attention)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model of hiddentap and of the floor, loaded once."""
        return load_model(self.source)

    @cached_property
    def config(self) -> Any:
        """The config of the text model; reading it loads no weights."""
        return load_config(self.source).get_text_config()

    @property
    def n(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def chosen_layers(self) -> tuple[int, ...]:
        """Those asked for, or an early, a middle and a late one: 1, 14 and 26 of 30."""
        return self.layers or tuple(sorted({min(1, self.n - 1), max(self.n // 2 - 1, 0), max(self.n - 4, 0)}))

    def asked(self, **fields: Any) -> CaptureSettings:
        """A run with the chosen layers and what enters the final norm, or other `fields`; data and folder may stay unused."""
        given = {"data": ("benchmark",), "out": self.folder, "layer_ids": self.chosen_layers, "final": "pre"}
        given["cpu_fast_paths"] = self.cpu_fast_paths
        return CaptureSettings(model=self.source, **(given | fields))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new folder, gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="hiddentap-benchmark-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
