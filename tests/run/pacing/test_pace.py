"""Batch sizes and compiled layers, decided by what was measured."""

from functools import partial
from pathlib import Path

import pytest
import torch

from hiddentap.capture.run.batches import TokenBatch
from hiddentap.capture.run.pacing import pace as pace_module
from hiddentap.capture.run.pacing.budget import TokenBudget
from hiddentap.capture.run.pacing.pace import Pace
from hiddentap.capture.run.pacing.speeds import Speed, Speeds, speed_key
from hiddentap.hooks import RealPositions

SIZES = (8, 16)


class Clock:
    """Time that passes when the engine says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pace_module.time, "perf_counter", lambda: self.now)


class FakeEngine:
    """Takes so many seconds a token, and more for the first compiled forward."""

    device = torch.device("cpu")

    def __init__(
        self, clock: Clock, eager: float, compiled: float, cost: float, error: Exception | None = None
    ) -> None:
        self.clock, self.eager, self.seconds_compiled, self.cost, self.error = clock, eager, compiled, cost, error
        self.compiled, self.history, self.made_with = False, [], {"device": "cpu"}

    def set_compiled(self, compiled: bool) -> None:
        self.compiled, self.pending = compiled, self.cost if compiled else 0.0

    def forward(self, batch: TokenBatch) -> object:
        if self.compiled and self.error is not None:
            raise self.error
        self.history.append(self.compiled)
        # A little for the batch itself, so that the larger size is the better one.
        self.clock.now += 1e-4 + batch.positions.T * (self.seconds_compiled if self.compiled else self.eager)
        if self.compiled:
            self.clock.now, self.pending = self.clock.now + self.pending, 0.0
        return object()


def batch_of(size: int) -> TokenBatch:
    return TokenBatch(0, torch.zeros(1, size, dtype=torch.int64), RealPositions.all(1, size))


def run(pace: Pace, batches: int) -> None:
    for _ in range(batches):
        size = pace.next_size()
        pace.forward(batch_of(size), size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_short_run_stays_with_layers_as_they_are(clock: Clock) -> None:
    engine = FakeEngine(clock, eager=0.01, compiled=0.001, cost=1.0)
    pace = Pace(engine, TokenBudget(SIZES), "auto", 1000, lambda text: None)
    run(pace, 20)
    assert not any(engine.history)
    assert pace.measured == Speed(16, pytest.approx(0.01, rel=0.01))


def test_a_long_run_tries_compiled_layers_and_keeps_them_where_they_are_faster(clock: Clock) -> None:
    engine = FakeEngine(clock, eager=0.01, compiled=0.004, cost=30.0)
    pace = Pace(engine, TokenBudget(SIZES), "auto", 1_000_000, lambda text: None)
    run(pace, 30)
    assert engine.history == [False] * 6 + [True] * 24
    measured = pace.measured
    assert (measured.batch_tokens, measured.compiled_batch_tokens) == (16, 16)
    assert measured.compiled == pytest.approx(0.004, rel=0.01)
    assert measured.compile_seconds == pytest.approx(30.0 + 72 * 0.004, abs=0.1)


def test_compiled_layers_that_are_slower_are_given_up_with_a_word(clock: Clock) -> None:
    notes: list[str] = []
    engine = FakeEngine(clock, eager=0.01, compiled=0.02, cost=1.0)
    run(Pace(engine, TokenBudget(SIZES), "auto", 1_000_000, notes.append), 30)
    assert engine.history == [False] * 6 + [True] * 6 + [False] * 18
    assert notes == ["compiled layers are no faster here; going on with layers as they are"]


def test_what_an_earlier_run_measured_decides_at_once(clock: Clock) -> None:
    known = Speed(16, 0.01, compiled=0.005, compiled_batch_tokens=8, compile_seconds=20.0)
    for tokens, compiles in ((3_000, False), (5_000, True)):
        engine = FakeEngine(clock, eager=0.01, compiled=0.005, cost=20.0)
        pace = Pace(engine, TokenBudget(SIZES), "auto", tokens, lambda text: None, known)
        run(pace, 3)
        assert (engine.history, pace.batch_tokens) == ([compiles] * 3, 8 if compiles else 16)
        assert pace.measured is None


def test_a_remembered_size_that_does_not_fit_any_more_gives_way_to_those_that_do(clock: Clock) -> None:
    known = Speed(32, 0.01, compiled=0.005, compiled_batch_tokens=32, compile_seconds=20.0)
    pace = Pace(FakeEngine(clock, 0.01, 0.01, 20.0), TokenBudget((8, 16, 32)), "off", 1000, lambda text: None, known)
    assert pace.next_size() == 32
    pace.limit(30)
    run(pace, 8)
    assert pace.measured == Speed(16, pytest.approx(0.01, rel=0.01))


def test_sizes_that_do_not_fit_are_not_tried_again_with_compiled_layers(clock: Clock) -> None:
    pace = Pace(FakeEngine(clock, 0.01, 0.004, 1.0), TokenBudget((8, 16, 32)), "auto", 10**6, lambda text: None)
    pace.limit(32)
    sizes = []
    for _ in range(20):
        sizes.append(pace.next_size())
        pace.forward(batch_of(sizes[-1]), sizes[-1])
    assert max(sizes) == 16
    found = pace.measured
    assert found is not None
    assert (found.batch_tokens, found.compiled_batch_tokens) == (16, 16)


def test_a_size_that_a_full_device_left_is_not_remembered(clock: Clock) -> None:
    pace = Pace(FakeEngine(clock, 0.01, 0.01, 20.0), TokenBudget(SIZES), "off", 1000, lambda text: None)
    pace.limit(7)
    assert pace.next_size() == 3
    run(pace, 8)
    assert pace.measured is None


def test_compiled_layers_of_one_size_are_judged_once_they_were_timed(clock: Clock) -> None:
    notes: list[str] = []
    engine = FakeEngine(clock, eager=0.01, compiled=0.02, cost=1.0)
    run(Pace(engine, TokenBudget.fixed(8), "auto", 1_000_000, notes.append), 12)
    assert engine.history == [False] * 3 + [True] * 3 + [False] * 6
    assert notes == ["compiled layers are no faster here; going on with layers as they are"]


def test_off_never_compiles_and_on_always_does(clock: Clock) -> None:
    for mode, expected in (("off", False), ("on", True)):
        engine = FakeEngine(clock, eager=0.01, compiled=0.001, cost=1.0)
        run(Pace(engine, TokenBudget(SIZES), mode, 10_000_000, lambda text: None), 12)
        assert engine.history == [expected] * 12


def test_a_failing_compiler_is_told_and_left_in_auto_and_raised_when_it_was_asked_for(clock: Clock) -> None:
    from torch._dynamo.exc import TorchDynamoException

    notes: list[str] = []
    broken = FakeEngine(clock, 0.01, 0.001, 1.0, TorchDynamoException("no C++ compiler"))
    run(Pace(broken, TokenBudget(SIZES), "auto", 1_000_000, notes.append), 10)
    assert broken.history == [False] * 10
    assert notes == ["compiling failed (no C++ compiler); going on with layers as they are"]
    with pytest.raises(TorchDynamoException):
        run(Pace(broken, TokenBudget(SIZES), "on", 100, notes.append), 1)


def test_speeds_are_remembered_by_key_and_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    speeds = Speeds(tmp_path / "cache/speeds.json")
    assert speeds.read("a") is None
    speeds.write("a", Speed(2048, 0.001))
    speeds.write("b", Speed(4096, 0.002, 0.001, 2048, 25.0))
    assert speeds.read("a") == Speed(2048, 0.001)
    assert speeds.read("b") == Speed(4096, 0.002, 0.001, 2048, 25.0)
    speeds.path.write_text("{half")
    assert speeds.read("a") is None


def test_runs_that_compute_otherwise_remember_apart() -> None:
    key = partial(speed_key, "0" * 64, ("layer 1",), torch.bfloat16)
    cpu = {"device": "cpu"}
    engines = [cpu, cpu | {"products": "in float32"}, cpu | {"tensor_parallel": 2}, {"device": "NVIDIA H200"}]
    ways = [{}, {"attention": "sdpa"}, {"attention": "eager"}, {"top_logits": 8}]
    assert len({key(engine, **way) for engine in engines for way in ways}) == len(engines) * len(ways)
    assert key(cpu) == key({"device": "cpu"}, attention=None, top_logits=0)


def test_threads_part_speeds_of_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(device: str) -> set[str]:
        found = set()
        for threads in (2, 4):
            monkeypatch.setattr(
                "hiddentap.capture.run.pacing.speeds.torch.get_num_threads", lambda threads=threads: threads
            )
            found.add(speed_key("0" * 64, ("layer 1",), torch.bfloat16, {"device": device}))
        return found

    assert len(keys("cpu")) == 2
    assert len(keys("NVIDIA H200")) == 1


def test_the_switch_of_the_fast_paths_parts_speeds_of_a_cpu_alone() -> None:
    def keys(device: str) -> set[str]:
        key = partial(speed_key, "0" * 64, ("layer 1",), torch.float32, {"device": device})
        return {key(cpu_fast_paths=switch) for switch in ("auto", "off")}

    assert len(keys("cpu")) == 2
    assert len(keys("NVIDIA H200")) == 1
