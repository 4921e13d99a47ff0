"""What a run changes in its process: nothing unless it was asked for, and not for longer than it lasts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hiddentap import CaptureSettings, ModelSource, capture_dataset, tap
from hiddentap.capture.cli.main import hiddentap
from hiddentap.capture.progress import Silent
from support import tiny

OPTIONS = ("--layer-ids", "0,2", "--batch-tokens", "512", "--compile", "off", "--quiet")


class Seen(Silent):
    """Notes, after each batch, whether transformers' attention is its own."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.own_attention: list[bool] = []
        self._then = then

    def advanced(self, done: object) -> None:
        self.own_attention.append(ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward)
        if not self.own_attention[-1]:
            self._then()


@pytest.fixture
def malloc_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that reach malloc's settings, on a machine where every fast path is faster."""
    calls: list[str] = []

    class Libc:
        def mallopt(self, *_: int) -> int:
            calls.append("mallopt")
            return 1

        def malloc_trim(self, _: int) -> None:
            calls.append("trim")

    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hiddentap.models.cpu.kept_memory.platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("hiddentap.models.cpu.kept_memory.ctypes.CDLL", lambda _: Libc())
    monkeypatch.setattr("hiddentap.models.cpu.switch.blocks_are_faster", lambda *_: True)
    monkeypatch.setattr("hiddentap.models.cpu.switch.float32_is_faster", lambda *_: True)
    return calls


def modes() -> int:
    return torch._C._len_torch_function_stack()


def settings(model: Path, data: Path, out: Path, **fields: object) -> CaptureSettings:
    given = {"layer_ids": (0, 2), "batch_tokens": 512, "compile": "off"} | fields
    return CaptureSettings(ModelSource(str(model)), (str(data),), out, **given)


def assert_as_before() -> None:
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert modes() == 0


@pytest.mark.parametrize("fields", [{}, {"cpu_fast_paths": "off"}], ids=["by default", "off"])
def test_a_run_inside_a_program_changes_nothing_in_it(
    fields: dict[str, object], llama: Path, data: Path, tmp_path: Path, malloc_calls: list[str]
) -> None:
    seen = Seen()
    capture_dataset(settings(llama, data, tmp_path / "out", **fields), seen)
    assert set(seen.own_attention) == {True}
    assert malloc_calls == []
    assert_as_before()


def test_a_run_that_was_asked_to_changes_it_until_its_end(
    llama: Path, data: Path, tmp_path: Path, malloc_calls: list[str]
) -> None:
    seen = Seen()
    capture_dataset(settings(llama, data, tmp_path / "out", cpu_fast_paths="auto"), seen)
    assert False in seen.own_attention
    # Both thresholds are set, and set back before what is free goes to the system.
    assert malloc_calls == ["mallopt", "mallopt", "mallopt", "mallopt", "trim"]
    assert_as_before()


def test_a_run_that_fails_changes_it_no_longer_than_that(
    llama: Path, data: Path, tmp_path: Path, malloc_calls: list[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        capture_dataset(settings(llama, data, tmp_path / "out", cpu_fast_paths="auto"), Seen(fail))
    assert malloc_calls[-1] == "trim"
    assert_as_before()


@pytest.mark.parametrize(("options", "opened"), [((), True), (("--cpu-fast-paths", "off"), False)], ids=["auto", "off"])
def test_the_command_opens_them_unless_told_not_to(
    options: tuple[str, ...], opened: bool, llama: Path, data: Path, tmp_path: Path, malloc_calls: list[str]
) -> None:
    places = ("--model", str(llama), "--data", str(data), "--out", str(tmp_path / "out"))
    assert hiddentap.main(["capture", *places, *OPTIONS, *options], standalone_mode=False) == 0
    assert bool(malloc_calls) is opened
    assert_as_before()


def test_tapping_a_model_changes_nothing(malloc_calls: list[str]) -> None:
    model = tiny.build_llama()
    found: list[bool] = []
    model.model.layers[0].register_forward_hook(
        lambda *_: found.append(ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward and modes() == 0)
    )
    with tap(model, (0, 2)) as tapped:
        tapped.run(tiny.token_ids(1, 9))
    assert set(found) == {True}
    assert malloc_calls == []
