"""Rows on an accelerator are those of a plain forward there, and reach the host by pinned copies."""

import pytest
import torch
from safetensors import safe_open

from hiddentap import tap
from support import tiny
from support.captured import captured
from support.model_folder import llama_folder, write_rows

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator is here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taps_give_the_states_of_a_plain_forward_bit_for_bit(dtype: torch.dtype) -> None:
    device = torch.accelerator.current_accelerator()
    model, ids = tiny.build("llama").to(device, dtype), tiny.token_ids(2, 9).to(device)
    plain = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    with tap(model, [0, 2]) as t:
        states = t.run(ids).aux_hidden_states
    assert states[0].device.type == device.type
    assert torch.equal(states[0], plain[1])
    assert torch.equal(states[1], plain[3])


def test_an_exact_run_stores_the_rows_of_single_forwards_on_the_device(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    folder = llama_folder(tmp_path / "model")
    lines = [{"id": f"s{i}", "input_ids": [10 + i] * (5 + 3 * i)} for i in range(4)]
    rows = write_rows(tmp_path / "rows.jsonl", lines)
    out = captured(folder, tmp_path / "out", data=rows, layer_ids=(0, 2), final="pre", exact=True)
    device = torch.accelerator.current_accelerator()
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    [shard] = sorted((out / "shards").iterdir())
    with safe_open(shard, framework="pt") as stored:
        offsets, order = stored.get_tensor("row_offsets").tolist(), stored.get_tensor("sample_index").tolist()
        states = stored.get_tensor("aux_hidden_states")
    for place, sample in enumerate(order):
        ids = torch.tensor([lines[sample]["input_ids"]], device=device)
        with torch.inference_mode():
            plain = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        mine = states[offsets[place] : offsets[place + 1]]
        assert torch.equal(mine[:, 0], plain[1][0].cpu())
        assert torch.equal(mine[:, 1], plain[3][0].cpu())
