"""`tap`: exact states of single forwards, and a model that is as it was afterwards."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from hiddentap.hooks import PositionsError, TapError, tap
from hiddentap.hooks.collector import OutputHook
from hiddentap.models.errors import UsageError, UsageTypeError
from support import tiny


def hooks_on(model: nn.Module) -> list[object]:
    return [h for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for h in d.values()]


def reference(family: str, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """hidden_states of a twin of the model, so that transformers' own recording leaves no hook on the one under test."""
    return tiny.build(family)(ids, output_hidden_states=True, use_cache=False).hidden_states


def test_layer_ids_0_2_3_are_those_boundaries_and_the_last_is_before_the_norm() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(2, 7)
    hs = reference("llama", ids)
    with tap(model, [0, 2, 3], final="both") as t:
        c = t.run(ids)
    assert torch.equal(c.aux_hidden_states[0], hs[1])
    assert torch.equal(c.aux_hidden_states[1], hs[3])
    assert not torch.equal(c.aux_hidden_states[2], hs[4])
    assert torch.equal(model.model.norm(c.aux_hidden_states[2]), hs[4])
    assert torch.equal(c.pre_norm, c.aux_hidden_states[2])
    assert torch.equal(c.post_norm, hs[4])


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_boundary_of_each_family_is_exact(family: str) -> None:
    model, ids = tiny.build(family), tiny.token_ids(2, 9)
    hs = reference(family, ids)
    with tap(model, [0, 1, 2, 3, 4], "boundary", final="post") as t:
        c = t.run(ids)
    for k in range(4):
        assert torch.equal(c.aux_hidden_states[k], hs[k]), f"boundary {k}"
    assert torch.equal(c.post_norm, hs[4])


def test_kimi_k25_with_text_only_taps_its_language_model() -> None:
    model, ids = tiny.build_kimi_k25(), tiny.token_ids(2, 9)
    hs = tiny.build_kimi_k25()(ids, output_hidden_states=True, use_cache=False).hidden_states
    with tap(model, [0, 2], final="post") as t:
        c = t.run(ids)
    assert torch.equal(c.aux_hidden_states[0], hs[1])
    assert torch.equal(c.aux_hidden_states[1], hs[3])
    assert torch.equal(c.post_norm, hs[4])


def test_the_forward_stops_after_the_last_tap_unless_its_output_is_wanted() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 5)
    ran = []
    model.model.layers[3].register_forward_hook(lambda *_: ran.append(3))
    model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    with tap(model, [0, 2]) as t:
        ran.clear()
        assert t.run(ids).output is None
        assert ran == []
    with tap(model, [0, 2], stop_early=False) as t:
        ran.clear()
        logits = t.run(ids).output.logits
        assert ran == [3, "head"]
    assert torch.equal(logits, model(ids, use_cache=False).logits)


def test_norm_states_are_taken_and_the_head_is_left_out() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 5)
    ran = []
    model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    with tap(model, [1], final="pre") as t:
        ran.clear()
        assert t.run(ids).pre_norm is not None
    assert ran == []


def test_early_stop_is_refused_where_a_later_value_is_asked_for() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 5)
    with (
        pytest.raises(UsageError, match="final='pre' asks for its states"),
        tap(model, [1], final="pre", stop_early=True),
    ):
        pass
    with tap(model, [1], stop_early=True) as t, pytest.raises(UsageError, match="a KV cache and early stop"):
        t.run(ids, use_cache=True)


def test_a_forward_that_fills_a_cache_runs_to_its_end() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 5)
    with tap(model, [1]) as t:
        output = t.run(ids, use_cache=True).output
    # The name since transformers 5.24, and the one before.
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5, 5, 5]


def test_rows_of_a_ragged_batch_equal_those_of_single_runs() -> None:
    model = tiny.build("llama")
    samples = [tiny.token_ids(1, n, seed=n) for n in (3, 5, 2)]
    for pad in (0, 11):
        batch = torch.full((3, 5), pad)
        for b, sample in enumerate(samples):
            batch[b, : sample.shape[1]] = sample
        with tap(model, [0, 3]) as t:
            rows = t.run(batch, lengths=[3, 5, 2]).rows()
            single = torch.cat([t.run(sample).rows() for sample in samples])
        assert rows.shape == (10, 2, 32)
        torch.testing.assert_close(rows, single, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_on_either_side_gives_the_same_real_rows(side: str) -> None:
    model = tiny.build("llama")
    a, b = tiny.token_ids(1, 3, seed=3), tiny.token_ids(1, 5, seed=5)
    pads = torch.zeros(1, 2, dtype=torch.int64)
    first = torch.cat([pads, a] if side == "left" else [a, pads], 1)
    mask = torch.cat([first != 0, torch.ones(1, 5, dtype=torch.bool)]).to(torch.int64)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with tap(model, [0, 3]) as t:
        rows = t.run(torch.cat([first, b]), attention_mask=mask, position_ids=position_ids).rows()
        single = torch.cat([t.run(a).rows(), t.run(b).rows()])
    torch.testing.assert_close(rows, single, atol=1e-5, rtol=0)


def test_a_mask_with_a_hole_and_a_lone_pad_at_an_edge_are_refused() -> None:
    model = tiny.build("llama")
    with tap(model, [0]) as t:
        with pytest.raises(PositionsError, match="hole"):
            t.run(tiny.token_ids(1, 3), attention_mask=torch.tensor([[1, 0, 1]]))
        with pytest.raises(PositionsError, match="begins or ends with the pad id 0"):
            t.run(torch.tensor([[9, 9, 0]]))


def test_the_kimi_linear_hybrid_is_ragged_safe_too() -> None:
    model = tiny.build("kimi_linear")
    samples = [tiny.token_ids(1, n, seed=n) for n in (3, 5, 2)]
    batch = torch.zeros(3, 5, dtype=torch.int64)
    for b, sample in enumerate(samples):
        batch[b, : sample.shape[1]] = sample
    with tap(model, [0, 2, 3]) as t:
        rows = t.run(batch, lengths=[3, 5, 2]).rows()
        single = torch.cat([t.run(sample).rows() for sample in samples])
    torch.testing.assert_close(rows, single, atol=1e-5, rtol=0)


def test_after_the_block_the_model_is_as_it_was() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    keys, attributes, cls = list(model.state_dict()), set(vars(model)), type(model)
    before = model(ids, use_cache=False).logits
    with tap(model, [0, 2], final="both") as t:
        t.run(ids)
        assert hooks_on(model)
        during = model(ids, use_cache=False).logits
    assert torch.equal(before, during)
    assert hooks_on(model) == []
    assert (list(model.state_dict()), set(vars(model)), type(model)) == (keys, attributes, cls)


def test_an_exception_in_the_middle_of_a_forward_leaves_no_residue() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    with tap(model, [0, 2]) as t:
        clean = t.run(ids)
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            t.run(tiny.token_ids(1, 4, seed=99))
        handle.remove()
        again = t.run(ids)
    assert all(torch.equal(a, b) for a, b in zip(clean.aux_hidden_states, again.aux_hidden_states, strict=True))
    with pytest.raises(ZeroDivisionError), tap(model, [0, 2]):
        raise ZeroDivisionError
    assert hooks_on(model) == []


def test_nested_taps_each_see_their_own_forward() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    hs = reference("llama", ids)
    with tap(model, [0]) as outer, tap(model, [2]) as inner:
        assert torch.equal(inner.run(ids).aux_hidden_states[0], hs[3])
        assert torch.equal(outer.run(ids).aux_hidden_states[0], hs[1])


def test_captured_states_are_not_touched_by_what_the_model_does_later() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    hs = reference("llama", ids)

    def add_in_place(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].add_(100.0)

    with torch.no_grad(), tap(model, [1], stop_early=False) as t:
        handle = model.model.layers[2].register_forward_pre_hook(add_in_place)
        captured = t.run(ids).aux_hidden_states[0]
        handle.remove()
    assert torch.equal(captured, hs[2])


def test_captured_states_carry_gradients_where_autograd_is_on() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    with tap(model, [1]) as t:
        t.run(ids).aux_hidden_states[0].sum().backward()
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None
    assert model.model.layers[2].mlp.up_proj.weight.grad is None


def test_two_threads_on_one_model_get_their_own_values() -> None:
    model = tiny.build("llama")
    batches = [tiny.token_ids(1, 6, seed=s) for s in range(8)]
    with torch.no_grad(), tap(model, [0, 2]) as t:
        expected = [t.run(ids).rows() for ids in batches]
        got: dict[int, torch.Tensor] = {}

        def work(indices: range) -> None:
            with torch.no_grad():
                for i in indices:
                    got[i] = t.run(batches[i]).rows()

        threads = [threading.Thread(target=work, args=(range(k, 8, 2),)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(got[i], expected[i]) for i in range(8))


def test_copies_of_a_tapped_model_carry_inert_hooks() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    with tap(model, [0]) as t:
        first = t.run(ids)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(isinstance(h, OutputHook) and h.inert for h in hooks_on(twin))
            assert torch.equal(twin(ids).logits, model(ids).logits)
        assert torch.equal(t.run(ids).aux_hidden_states[0], first.aux_hidden_states[0])


def test_captured_tensors_are_released_with_their_holder() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    with torch.no_grad(), tap(model, [0]) as t:
        captured = t.run(ids)
        reference_to_state = weakref.ref(captured.aux_hidden_states[0])
        del captured
        gc.collect()
        assert reference_to_state() is None


def test_gradient_checkpointing_fires_each_tap_once_and_backward_adds_nothing() -> None:
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    plain = reference("llama", ids)[2]
    model.train()
    model.gradient_checkpointing_enable()
    with tap(model, [1], stop_early=False) as t:
        c = t.run(ids)
        c.output.logits.sum().backward()
        assert torch.equal(c.aux_hidden_states[0], plain)


def test_a_layer_that_runs_twice_in_one_forward_is_refused() -> None:
    model = tiny.build("llama")
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[0], layers[1], layers[1], layers[3]])
    with pytest.raises(TapError, match=r"model\.layers\.1 ran \d times in one forward"), tap(model, [1]):
        pass


def test_a_layer_that_is_skipped_is_refused_by_name() -> None:
    model = tiny.build("llama")
    model.model.config.num_hidden_layers = 2
    with pytest.raises(TapError, match=r"model\.layers\.3 ran 0 times"), tap(model, [3]):
        pass


def test_something_between_two_layers_is_refused() -> None:
    model = tiny.build("llama")
    model.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]), prepend=True)
    with (
        pytest.raises(TapError, match=r"boundary 2 .*model\.layers\.1 gives out is not.*model\.layers\.2 takes in"),
        tap(model, [1]),
    ):
        pass
    with tap(model, [0]) as t:
        assert t.run(tiny.token_ids(1, 3)).rows().shape == (3, 1, 32)


def test_taps_attached_after_a_compiled_call_are_right_or_raise_and_never_silently_miss() -> None:
    torch._dynamo.reset()
    model, ids = tiny.build("llama"), tiny.token_ids(1, 4)
    model.compile(backend="eager")
    hs = reference("llama", ids)
    with torch.no_grad():
        model(ids, use_cache=False)
        for _ in range(3):
            try:
                with tap(model, [0, 2]) as t:
                    states = t.run(ids).aux_hidden_states
            except TapError as refused:
                assert "did not fire" in str(refused) or "ran 0 times" in str(refused)  # noqa: PT017
                torch._dynamo.reset()
            else:
                assert torch.equal(states[0], hs[1])
                assert torch.equal(states[1], hs[3])
    assert hooks_on(model) == []


def test_shapes_other_than_batch_sequence_width_are_refused() -> None:
    model = tiny.build("llama")
    with tap(model, [3]) as t:
        model.model.layers[3].register_forward_hook(lambda module, args, output: output[:, :1])
        with pytest.raises(TapError, match=r"boundary 4 gave a float32 tensor \(1, 1, 32\); expected .*\(1, 4, H\)"):
            t.run(tiny.token_ids(1, 4))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_an_empty_batch_is_refused(shape: tuple[int, int]) -> None:
    with (
        tap(tiny.build("llama"), [0]) as t,
        pytest.raises(UsageError, match=rf"at least one token; got .*\({shape[0]}, "),
    ):
        t.run(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("wrong", [-1, 96])
def test_ids_that_the_vocabulary_has_not_are_refused_with_their_place(wrong: int) -> None:
    ids = tiny.token_ids(2, 5)
    ids[1, 3] = wrong
    text = rf"expected token ids within 0\.\.95, .* found {wrong} at sequence 1, position 3\."
    with tap(tiny.build("llama"), [0]) as t:
        with pytest.raises(UsageError, match=text):
            t.run(ids)
        ids[1, 3] = 95
        assert t.run(ids).aux_hidden_states[0].shape == (2, 5, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int16])
def test_ids_of_another_dtype_are_refused_in_words(dtype: torch.dtype) -> None:
    with tap(tiny.build("llama"), [0]) as t:
        with pytest.raises(UsageTypeError, match=rf"input_ids of dtype int64; got {dtype}.*inputs_embeds"):
            t.run(tiny.token_ids(2, 7).to(dtype))
        assert torch.equal(
            t.run(tiny.token_ids(2, 7).int()).aux_hidden_states[0], t.run(tiny.token_ids(2, 7)).aux_hidden_states[0]
        )
