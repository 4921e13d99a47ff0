"""Taps on models spread over two gloo processes: every rank gets the states that one process alone gets."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import tap
from support import kimi_k3, tiny
from support.ports import free_port


def _join(rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)


def _equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.contiguous())
    return torch.equal(both[0], both[1])


@torch.no_grad()
def _fully_sharded(rank: int, port: int) -> None:
    _join(rank, port)
    ids = tiny.token_ids(2, 6)
    alone = tiny.build("llama")(ids, output_hidden_states=True, use_cache=False).hidden_states
    model = tiny.build("llama")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
    with tap(model, [0, 2]) as t:  # each forward ends in the middle
        for _ in range(2):
            states = t.run(ids).aux_hidden_states
            assert torch.equal(states[0], alone[1])
            assert torch.equal(states[1], alone[3])
    with tap(model, [3], final="both") as t:
        captured = t.run(ids)
        assert torch.equal(captured.post_norm, alone[4])
    logits = model(ids, use_cache=False).logits
    with_capture(model).set_dspark_layers_to_capture([0, 2])
    output = model(ids, use_cache=False)
    assert torch.equal(output.aux_hidden_states[1], alone[3])
    assert torch.equal(output.logits, logits)
    _mixture_of_shards(ids)
    dist.destroy_process_group()


def _mixture_of_shards(ids: torch.Tensor) -> None:
    adapter, mesh = "attention_residuals.mixture", init_device_mesh("cpu", (2,))
    with tap(kimi_k3.build(), [0, 3, 5], adapter=adapter) as t:
        alone = t.run(ids).aux_hidden_states
    model = kimi_k3.build()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with tap(model, [0, 3, 5], adapter=adapter) as t:
        states = t.run(ids).aux_hidden_states
    assert all(torch.equal(a, b) for a, b in zip(alone, states, strict=True))


@torch.no_grad()
def _tensor_parallel(rank: int, port: int, folder: str) -> None:
    _join(rank, port)
    ids = tiny.token_ids(2, 6)
    alone = tiny.build("llama")(ids, output_hidden_states=True, use_cache=False).hidden_states
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert tuple(model.model.layers[0].mlp.up_proj.weight.to_local().shape) == (32, 32)
    with tap(model, [0, 2], final="both") as t:
        captured = t.run(ids)
    states = (*captured.aux_hidden_states, captured.post_norm)
    for state, expected in zip(states, (alone[1], alone[3], alone[4]), strict=True):
        assert type(state) is torch.Tensor
        assert _equal_on_all_ranks(state)
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
    model = with_capture(model)
    model.set_dspark_layers_to_capture([0, 2])
    rows = model(ids, use_cache=False).auxiliary_device_output.aux_hidden_states
    assert torch.equal(rows[:, 1].view(2, 6, 32), captured.aux_hidden_states[1])
    dist.destroy_process_group()


def test_fully_sharded_layers_give_the_states_of_one_process_and_so_does_what_reads_next_to_their_weights() -> None:
    mp.spawn(_fully_sharded, args=(free_port(),), nprocs=2)


def test_tensor_parallel_ranks_hold_equal_whole_states(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    mp.spawn(_tensor_parallel, args=(free_port(), str(tmp_path)), nprocs=2)
