"""What one watched forward proves of a model, and what it leaves alone."""

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import TapError, probe, tap
from hiddentap.hooks.truth import Watch
from hiddentap.models.decoder import find_decoder
from support import tiny
from support.architectures import build


def test_time_major_states_are_refused_when_attached_whatever_the_shape_of_a_later_batch() -> None:
    text = r"handles a float32 tensor \(5, 2, 32\) in a forward of 2 sequences of 5 tokens; expected \(2, 5, H\)"
    with pytest.raises(TapError, match=text), tap(build("xlnet"), [1]):
        pass


def test_a_first_captured_call_as_wide_as_long_does_not_hide_time_major_states() -> None:
    model: Any = with_capture(build("xlnet"))
    model.set_dspark_layers_to_capture([1])
    with torch.no_grad(), pytest.raises(TapError, match=r"expected \(2, 5, H\), batch first"):
        model(tiny.token_ids(5, 5))
    square: Any = with_capture(tiny.build("llama"))
    square.set_dspark_layers_to_capture([1])
    with torch.no_grad():
        assert square(tiny.token_ids(5, 5)).aux_hidden_states[0].shape == (5, 5, 32)


class Shortened(nn.Module):
    """Keeps the first tokens of what leaves a layer."""

    def forward(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output[:, :3]


def test_states_of_fewer_tokens_than_went_in_are_refused_when_attached() -> None:
    model: Any = tiny.build("llama")
    model.model.layers[3].register_forward_hook(Shortened().forward)
    with pytest.raises(TapError, match=r"\(2, 3, 32\) in a forward of 2 sequences of 5 tokens"), tap(model, [3]):
        pass


def test_only_the_watching_thread_is_watched() -> None:
    model: Any = with_capture(tiny.build("llama"))
    model.set_dspark_layers_to_capture([0, 2])
    expected = {
        seed: tiny.build("llama")(tiny.token_ids(1, 6, seed=seed), output_hidden_states=True) for seed in range(4)
    }
    for _ in range(5):
        model.set_dspark_layers_to_capture([0, 2])  # the next call is the first captured one
        got: dict[int, Any] = {}
        together = threading.Barrier(4)

        def work(seed: int, got: dict[int, Any] = got, together: threading.Barrier = together) -> None:
            together.wait()
            with torch.no_grad():
                got[seed] = model(tiny.token_ids(1, 6, seed=seed)).aux_hidden_states

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [0, 1, 2, 3]
        for seed, states in got.items():
            assert torch.equal(states[1], expected[seed].hidden_states[3])


def test_a_probe_while_another_thread_uses_the_model_sees_its_own_forward() -> None:
    model: Any = tiny.build("llama")
    decoder, stop = find_decoder(model), threading.Event()

    def use() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(tiny.token_ids(1, 3), use_cache=False)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(5):
            assert probe(decoder).visits == (1, 1, 1, 1)
    finally:
        stop.set()
        thread.join()


def test_attaching_moves_no_random_numbers_in_training_mode() -> None:
    model: Any = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    before = torch.random.get_rng_state()
    with tap(model, [1]):
        assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in model.modules())


class Meeting:
    """A hook that holds another thread inside a module until this one has taken its own hooks off."""

    def __init__(self, module: nn.Module) -> None:
        self.inside, self.removed = threading.Event(), threading.Event()
        module.register_forward_pre_hook(self._wait)

    def _wait(self, _module: nn.Module, _args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            self.removed.wait(10)

    def while_another_thread_is_inside(self, model: nn.Module, hooks: AbstractContextManager[Any]) -> list[Tensor]:
        """Return the logits of a forward of another thread, in the middle of which the block of `hooks` ends."""
        got: list[Tensor] = []
        thread = threading.Thread(target=lambda: got.append(model(tiny.token_ids(1, 6)).logits.detach()))
        with hooks:
            thread.start()
            assert self.inside.wait(10)
        self.removed.set()
        thread.join()
        return got


@pytest.mark.parametrize("hooks", ["watch", "taps", "norm"])
def test_a_forward_of_another_thread_goes_on_where_hooks_are_removed_under_it(hooks: str) -> None:
    model: Any = tiny.build("llama")
    expected = model(tiny.token_ids(1, 6)).logits.detach()
    met = Meeting({"watch": model.model.layers[1], "taps": model.model.layers[0], "norm": model.model.norm}[hooks])
    removed = {
        "watch": lambda: Watch(find_decoder(model)).watching(),
        "taps": lambda: tap(model, [0], convention="boundary"),
        "norm": lambda: tap(model, [1], final="pre"),
    }[hooks]()
    got = met.while_another_thread_is_inside(model, removed)
    assert torch.equal(got[0], expected)
