"""The seam between a run and its engines: one added as a package captures through the whole run."""

import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

import hiddentap
from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.engines import ENGINES, EngineEntry
from hiddentap.capture.outputs import DeviceHiddenStates, RowLayout
from hiddentap.capture.run import estimate_run
from hiddentap.capture.run.attached_model import AttachedModel
from hiddentap.capture.run.backend import EngineKind
from hiddentap.capture.run.batches import TokenBatch
from hiddentap.capture.run.pacing.pace import SteadyPace
from hiddentap.capture.store import check_folder
from hiddentap.hooks import Taps
from hiddentap.models.decoder import find_decoder
from hiddentap.models.errors import UsageError
from hiddentap.models.loading import LoadedModel, describe_model

H = 32
IDENTITY: Mapping[str, Any] = MappingProxyType({"mode": "toy", "toy_version": 7})


class ToyEngine:
    """Gives each row its token id, a thousand times its position, and a hundredth of the boundary's number."""

    device = torch.device("cpu")
    made_with: Mapping[str, Any] = MappingProxyType({"device": "a toy"})

    def __init__(self, boundaries: tuple[int, ...], batches: list[tuple[int, ...]], *, padded: bool) -> None:
        self._boundaries, self._batches, self._padded = boundaries, batches, padded

    def forward(self, batch: TokenBatch) -> DeviceHiddenStates:
        lengths = batch.positions.lengths
        self._batches.append(lengths)
        rows = zip(batch.input_ids, lengths, strict=True)
        ids = torch.cat([row[:length] + 1000 * torch.arange(length) for row, length in rows])
        states = ids[:, None, None] + torch.tensor(self._boundaries)[:, None] / 100
        return DeviceHiddenStates(
            {"aux_hidden_states": states.expand(-1, -1, H).float()}, RowLayout.of_prompts(lengths)
        )


@dataclass(frozen=True)
class ToyBackend:
    settings: CaptureSettings
    loaded: LoadedModel
    attached: AttachedModel
    batches: list[tuple[int, ...]]
    identity = IDENTITY
    takes_images = False

    @contextmanager
    def engine(self, store_dtype: torch.dtype, longest: int) -> Iterator[ToyEngine]:
        yield ToyEngine(self.attached.taps.boundaries, self.batches, padded=self.settings.engine_options["padded"])

    def pacer(self, engine: ToyEngine, tokens: int, note: Callable[[str], None]) -> SteadyPace:
        return SteadyPace(engine, self.settings.batch_tokens or 200)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Add an engine `toy`; returns the lengths of the batches that it runs."""
    batches: list[tuple[int, ...]] = []

    def backend(settings: CaptureSettings, ranks: object) -> ToyBackend:
        loaded = describe_model(settings.model)
        decoder = find_decoder(loaded.model)
        taps = Taps(settings.layers.boundaries(decoder.n), "none")
        return ToyBackend(settings, loaded, AttachedModel(decoder, taps, H, H, torch.float32, None), batches)

    def refuse(settings: CaptureSettings) -> None:
        if settings.exact:
            raise UsageError("a toy is never exact.")

    module: Any = ModuleType("a_toy_engine")
    module.KIND = EngineKind(refuse, lambda _: IDENTITY, backend)
    monkeypatch.setitem(sys.modules, "a_toy_engine", module)
    monkeypatch.setitem(ENGINES, "toy", EngineEntry("a_toy_engine", "a toy", takes_options=True))
    return batches


def settings(model: Path, data: Path, out: Path, **fields: object) -> CaptureSettings:
    given = {"layer_ids": (0, 2), "final": "none", "engine": "toy", "engine_options": {"padded": False}, **fields}
    return CaptureSettings(model=ModelSource(str(model)), data=(str(data),), out=out, **given)


@pytest.mark.parametrize("padded", [False, True], ids=["rows one after the other", "rows between padding"])
def test_an_engine_of_one_package_captures_through_the_whole_run(
    padded: bool, toy: list[tuple[int, ...]], llama: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    summary = capture_dataset(settings(llama, data, out, shard_rows=150, engine_options={"padded": padded}))
    assert (summary.captured, summary.rejected, summary.batch_tokens) == (5, 0, 200)
    dataset = CapturedDataset(out)
    for item in (dataset[i] for i in range(5)):
        known = item["input_ids"] + 1000 * torch.arange(len(item["input_ids"]))
        expected = torch.stack([known + 0.01, known + 0.03], 1)[:, :, None].expand(-1, -1, H)
        assert torch.equal(item["aux_hidden_states"], expected)
    assert sorted(length for lengths in toy for length in lengths) == sorted(
        len(dataset[i]["input_ids"]) for i in range(5)
    )
    assert check_folder(out) == []


def test_its_header_names_the_mode_and_what_a_later_run_must_agree_with(
    toy: object, llama: Path, data: Path, tmp_path: Path
) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    with safe_open(tmp_path / "out/shards/shard-000000.safetensors", "pt") as shard:
        about: Mapping[str, Any] = json.loads(shard.metadata()["hiddentap"])["metadata"]
    assert (about["mode"], about["toy_version"], about["made_with"]["device"]) == ("toy", 7, "a toy")
    assert capture_dataset(settings(llama, data, tmp_path / "out")).tokens_now == 0
    with pytest.raises(UsageError, match=r'mode: "toy" -> "batched"'):
        capture_dataset(settings(llama, data, tmp_path / "out", engine="hf", engine_options={}))


def test_a_run_of_its_own_mode_whose_plan_is_gone_is_planned_again_and_keeps_its_shards(
    toy: list[tuple[int, ...]], llama: Path, data: Path, tmp_path: Path
) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    shard = tmp_path / "out/shards/shard-000000.safetensors"
    before = shard.stat().st_mtime_ns
    (tmp_path / "out/plan/plan.json").unlink()
    toy.clear()
    again = capture_dataset(settings(llama, data, tmp_path / "out"))
    assert (again.captured, again.tokens_now, toy) == (5, 0, [])
    assert shard.stat().st_mtime_ns == before
    assert check_folder(tmp_path / "out") == []


def test_its_dry_run_and_its_refusals_are_its_own(toy: list[tuple[int, ...]], llama, data, tmp_path) -> None:
    assert estimate_run(settings(llama, data, tmp_path / "out")).tokens_per_second > 0
    assert toy
    for run in (capture_dataset, estimate_run):
        with pytest.raises(UsageError, match="a toy is never exact"):
            run(settings(llama, data, tmp_path / "out", exact=True))
    with pytest.raises(UsageError, match=r"engine options \(a\) are for the engine vllm, toy; got 'hf'"):
        settings(llama, data, tmp_path / "out", engine="hf", engine_options={"a": 1})
    with pytest.raises(UsageError, match="tp spreads a Hugging Face model; the engine toy"):
        settings(llama, data, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"top_logits": 4}, "--top-logits: asked for 4, 0 would be stored"),
        ({"final": "both"}, "--final: asked for both, none would be stored"),
        ({"exact": True}, "--exact: asked for True, False would be stored"),
    ],
    ids=["top logits", "norm states", "exact"],
)
def test_an_engine_that_would_leave_out_what_was_asked_for_is_refused_when_it_is_opened(
    fields: dict[str, Any], told: str, toy: object, llama: Path, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    kind = sys.modules["a_toy_engine"].KIND
    monkeypatch.setattr(sys.modules["a_toy_engine"], "KIND", replace(kind, refuse=lambda _: None))
    for run in (capture_dataset, estimate_run):
        with pytest.raises(UsageError, match=f"the engine toy does not deliver what was asked for .{told}"):
            run(settings(llama, data, tmp_path / "out", **fields))


def test_no_code_outside_an_engine_compares_with_the_name_of_one() -> None:
    """Held in the code of runs and of the command; id systems, some of which are called alike, are elsewhere."""
    root = Path(hiddentap.__file__).parent
    own = ("ray_", "hugging_face")
    paths = sorted([*(root / "capture/run").glob("*.py"), *(root / "capture/cli").glob("*.py")])
    for path in (path for path in paths if not path.name.startswith(own)):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        compared = [part for node in tree if isinstance(node, ast.Compare) for part in ast.walk(node)]
        assert not {part.value for part in compared if isinstance(part, ast.Constant)} & set(ENGINES), path
