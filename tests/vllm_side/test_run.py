"""Runs with the engine vllm, on a stand-in for vLLM: rows, what is asked of it, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.store import check_folder
from hiddentap.hooks import TapError
from hiddentap.models.errors import RunError, UsageError
from hiddentap.models.layer_ids import LayerIdError
from support import fake_vllm


def settings(model: Path, data: Path, out: Path, **fields: object) -> CaptureSettings:
    given = {"layer_ids": (0, 2), "engine": "vllm"} | fields
    source = given.pop("source", None) or ModelSource(str(model))
    return CaptureSettings(model=source, data=(str(data),), out=out, **given)


def plain(model: Path, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Embeddings, the outputs of the layers before the last, and what enters the norm."""
    entered = []
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    loaded.model.norm.register_forward_pre_hook(lambda _m, args: entered.append(args[0][0]))
    with torch.no_grad():
        hs = loaded(ids[None].long(), output_hidden_states=True, use_cache=False).hidden_states
    return (*(state[0] for state in hs[:-1]), entered[0])


def assert_rows(out: Path, model: Path, boundaries: tuple[int, ...], *, pre_norm: bool = True) -> None:
    dataset = CapturedDataset(out)
    assert [dataset[i]["sample_id"] for i in range(len(dataset))] == ["a", "b", "c", "d", "e"]
    for item in (dataset[i] for i in range(5)):
        states = plain(model, item["input_ids"])
        for k, boundary in enumerate(boundaries):
            assert torch.allclose(item["aux_hidden_states"][:, k], states[boundary], atol=1e-6)
        assert ("pre_norm" in item) == pre_norm
        if pre_norm:
            assert torch.allclose(item["pre_norm"], states[4], atol=1e-6)
    assert check_folder(out) == []


def test_every_row_comes_to_its_sample_and_layer(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    summary = capture_dataset(settings(llama, data, tmp_path / "out"))
    assert (summary.captured, summary.rejected) == (5, 0)
    assert_rows(tmp_path / "out", llama, (1, 3))


@pytest.mark.parametrize(
    ("fields", "asked", "boundaries"),
    [
        ({"layer_ids": (0, 2)}, [1, 3, 4], (1, 3)),
        ({"layer_ids": (0, 2), "final": "none"}, [1, 3], (1, 3)),
        ({"layer_ids": (1, 3)}, [2, 4], (2, 4)),
        ({"layer_ids": (3,), "final": "none"}, [4], (4,)),
        ({"layer_ids": (0, 2, 4), "convention": "boundary"}, [0, 2, 4], (0, 2, 4)),
        ({"layer_ids": (1, 3), "ids_of": "vllm"}, [1, 3, 4], (1, 3)),
        ({"layer_ids": (-1, 1), "ids_of": "deepspec"}, [0, 2, 4], (0, 2)),
    ],
)
def test_ids_become_those_of_vllm_and_n_is_appended_for_pre_norm(
    fields: dict[str, object], asked: list[int], boundaries: tuple[int, ...], llama, data, tmp_path, monkeypatch
) -> None:
    opened = fake_vllm.install(monkeypatch).opened
    capture_dataset(settings(llama, data, tmp_path / "out", **fields))
    assert opened[0].ids == asked
    assert_rows(tmp_path / "out", llama, boundaries, pre_norm=fields.get("final") != "none")


def test_batches_and_steps_of_any_size_give_the_same_rows(llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    options = {"max_num_batched_tokens": 37}  # less than most samples have: they are computed over several steps
    capture_dataset(settings(llama, data, tmp_path / "out", batch_tokens=200, shard_rows=150, engine_options=options))
    assert_rows(tmp_path / "out", llama, (1, 3))


def test_vllm_is_opened_without_a_prefix_cache_for_the_longest_sample(llama, data, tmp_path, monkeypatch) -> None:
    opened = fake_vllm.install(monkeypatch).opened
    threads = torch.set_num_threads
    options = {"tensor_parallel_size": 2, "quantization": "fp8"}
    capture_dataset(settings(llama, data, tmp_path / "out", engine_options=options, compile="off"))
    (llm,) = opened
    longest = max(len(CapturedDataset(tmp_path / "out")[i]["input_ids"]) for i in range(5))
    given = {
        name: value for name, value in llm.arguments.items() if name not in ("kv_transfer_config", "speculative_config")
    }
    assert given == {
        "model": str(llama), "revision": None, "trust_remote_code": False, "dtype": "float32", "skip_tokenizer_init": True,
        "enable_prefix_caching": False, "use_tqdm_on_load": False, "max_model_len": longest + 2,
        "max_num_batched_tokens": 4096, "enforce_eager": True, "disable_log_stats": True, "tensor_parallel_size": 2,
        "quantization": "fp8", "kv_cache_memory_bytes": 2 * 1024**3,
    }  # fmt: skip
    assert llm.arguments["speculative_config"]["method"] == "extract_hidden_states"
    assert llm.closed
    assert torch.set_num_threads is threads


def test_the_shard_says_that_vllm_made_it(llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    options = {"tensor_parallel_size": 2, "quantization": "fp8"}
    capture_dataset(settings(llama, data, tmp_path / "out", store_dtype="bfloat16", engine_options=options))
    with safe_open(tmp_path / "out/shards/shard-000000.safetensors", "pt") as shard:
        about = json.loads(shard.metadata()["hiddentap"])["metadata"]
    assert (about["mode"], about["attn_implementation"], about["engine_options"]) == (
        "vllm", "vllm", {"quantization": "fp8"},
    )  # fmt: skip
    assert (about["compute_dtype"], about["store_dtype"]) == ("float32", "bfloat16")
    assert (about["made_with"]["vllm"], about["made_with"]["device"]) == ("0.0-fake", "a fake device")
    assert about["taps"] == {
        "convention": "layer_output", "layer_ids": [0, 2], "boundaries": [1, 3], "final": "pre", "num_hidden_layers": 4,
        "hidden_size": 32, "layers_path": "model.layers", "norm_path": "model.norm", "adapter": None,
    }  # fmt: skip


def test_a_finished_run_is_not_opened_again_and_one_of_another_engine_is_refused(
    llama, data, tmp_path, monkeypatch
) -> None:
    opened = fake_vllm.install(monkeypatch).opened
    capture_dataset(settings(llama, data, tmp_path / "out"))
    more = {"gpu_memory_utilization": 0.5}
    assert capture_dataset(settings(llama, data, tmp_path / "out", engine_options=more)).shards_done_before == 1
    assert len(opened) == 1
    with pytest.raises(UsageError, match=r"mode: .*vllm.* -> .*batched"):
        capture_dataset(settings(llama, data, tmp_path / "out", engine="hf"))
    with pytest.raises(UsageError, match=r"quantization"):
        capture_dataset(settings(llama, data, tmp_path / "out", engine_options={"quantization": "fp8"}))


def test_rows_of_another_token_are_refused(llama, data, tmp_path, monkeypatch) -> None:
    opened = fake_vllm.install(monkeypatch, change_token=True).opened
    with pytest.raises(
        RunError, match=r"other tokens than were asked for: 1 rows, the first at row 7 .*token 8 in place of 7"
    ):
        capture_dataset(settings(llama, data, tmp_path / "out"))
    assert opened[0].closed
    assert not list((tmp_path / "out/shards").glob("*.safetensors"))


@pytest.mark.parametrize(("fault", "missing"), [({"forget": 0}, "8 of 8"), ({"cut": 3}, "5 of 8")])
def test_rows_that_vllm_leaves_out_are_missed(fault, missing: str, llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch, **fault)
    with pytest.raises(RunError, match=rf"no hidden states for {missing} tokens.*--engine hf"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_a_layer_that_vllm_does_not_give_is_found_before_a_sample_is_computed(
    llama, data, tmp_path, monkeypatch
) -> None:
    fake_vllm.install(monkeypatch, missing_id=3)
    with pytest.raises(TapError, match=r"same values for boundary 1 and boundary 3.*--engine hf"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_what_vllm_says_when_it_fails_is_told(llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch, fail="no kernel image\nand a long story")
    with pytest.raises(RunError, match=r"vLLM failed in a batch of 1 prompts: no kernel image\.$"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_samples_with_values_that_are_not_finite_are_rejected(llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    states = fake_vllm.LLM._states

    def with_nan(self: fake_vllm.LLM, ids: list[int]) -> torch.Tensor:
        rows = states(self, ids)
        if len(ids) > 60:  # the longest sample, c
            rows[2, 1, 0], rows[3, 2] = torch.nan, 0.0
        return rows

    monkeypatch.setattr(fake_vllm.LLM, "_states", with_nan)
    summary = capture_dataset(settings(llama, data, tmp_path / "out"))
    assert summary.rejected_by_code == {"bad_values": 1}
    (line,) = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    reject = json.loads(line)
    assert reject["id"] == "c"
    assert "not finite at layer 2: 1 row(s), the first at token 2" in reject["reason"]
    assert "all zero at pre-norm: 1 row(s), the first at token 3" in reject["reason"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"exact": True}, r"--exact .*--engine hf"),
        ({"prefill_chunk": 8}, r"--prefill-chunk: vLLM runs long prompts in chunks of its own"),
        ({"stream_weights": True}, r"--stream-weights: vLLM loads the whole model"),
        ({"adapter": "next_input"}, r"--adapter next_input: vLLM gives plain residual streams"),
        ({"top_logits": 4}, r"--top-logits: vLLM hands over hidden states"),
        ({"final": "post"}, r"--final post: .*pre"),
        ({"final": "both"}, r"--final both: .*pre"),
        ({"head": True}, r"--head: "),
        ({"source": ModelSource("m", device="cuda:1")}, r"--device cuda:1"),
        ({"source": ModelSource("m", device_map="auto")}, r"tensor_parallel_size=N"),
        ({"source": ModelSource("m", peft="adapter")}, r"--peft adapter: vLLM would leave the adapter out"),
        ({"source": ModelSource("m", attn_implementation="eager")}, r"--attn-implementation"),
        (
            {"engine_options": {"max_model_len": 9, "dtype": "half"}},
            r"engine options dtype, max_model_len are set by the run",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_any_work(fields, why: str, llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    with pytest.raises(UsageError, match=why):
        capture_dataset(settings(llama, data, tmp_path / "out", **fields))
    assert not (tmp_path / "out").exists()


def test_several_ranks_are_refused(llama, data, tmp_path, monkeypatch) -> None:
    from hiddentap.capture.run.engines.vllm import require_vllm_can

    fake_vllm.install(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"torchrun"):
        require_vllm_can(settings(llama, data, tmp_path / "out"))


def test_without_vllm_the_extra_is_named(llama, data, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"pip install 'hiddentap\[vllm\]'"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_a_layer_outside_the_model_is_refused(llama, data, tmp_path, monkeypatch) -> None:
    fake_vllm.install(monkeypatch)
    with pytest.raises(LayerIdError, match="outside the decoder range"):
        capture_dataset(settings(llama, data, tmp_path / "out", layer_ids=(0, 4)))


def test_engine_options_without_vllm_are_refused(llama, data, tmp_path) -> None:
    with pytest.raises(UsageError, match=r"engine options \(a\) are for the engine vllm; got 'hf'"):
        settings(llama, data, tmp_path / "out", engine="hf", engine_options={"a": 1})
    with pytest.raises(UsageError, match=r"engine must be one of hf, ray, vllm; got 'jax'"):
        settings(llama, data, tmp_path / "out", engine="jax")
