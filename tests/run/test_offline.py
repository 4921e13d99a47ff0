"""The offline run on tiny models: every stored row against a plain forward of its sample alone."""

import json
import platform
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, TextSettings, capture_dataset, tap
from hiddentap.capture.store import ShardError, check_folder
from hiddentap.hooks import TapError
from hiddentap.models.cpu.kept_memory import KeptMemory
from hiddentap.models.errors import RunError, UsageError
from hiddentap.models.head import load_head
from support import tiny
from support.model_folder import CHATS, VOCAB, chat, llama_folder, model_folder, write_rows
from support.seen_products import SeenProducts


def settings(model: Path, data: Path, out: Path, **fields: object) -> CaptureSettings:
    given = {"layer_ids": (0, 2, 3), "final": "both"} | fields
    return CaptureSettings(model=ModelSource(str(model)), data=(str(data),), out=out, **given)


def plain_states(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model(ids[None], output_hidden_states=True, use_cache=False).hidden_states


def assert_rows_are_those_of_plain_forwards(out: Path, model: nn.Module, norm: nn.Module, *, exact: bool) -> None:
    compare = torch.equal if exact else lambda a, b: torch.allclose(a, b, atol=1e-5, rtol=1e-5)
    dataset = CapturedDataset(out)
    assert len(dataset) == len(CHATS)
    for item in (dataset[i] for i in range(len(dataset))):
        hs = plain_states(model, item["input_ids"])
        assert compare(item["aux_hidden_states"][:, 0], hs[1][0])
        assert compare(item["aux_hidden_states"][:, 1], hs[3][0])
        assert compare(norm(item["pre_norm"]), hs[4][0])
        assert compare(item["post_norm"], hs[4][0])


def test_an_exact_run_stores_the_rows_of_plain_forwards_bit_for_bit(llama: Path, data: Path, tmp_path: Path) -> None:
    summary = capture_dataset(settings(llama, data, tmp_path / "out", exact=True))
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    assert_rows_are_those_of_plain_forwards(tmp_path / "out", model, model.model.norm, exact=True)
    assert (summary.captured, summary.rejected, summary.shards) == (5, 0, 1)
    assert check_folder(tmp_path / "out") == []


def test_a_batched_run_stores_them_within_rounding(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", batch_tokens=512))
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    assert_rows_are_those_of_plain_forwards(tmp_path / "out", model, model.model.norm, exact=False)


@pytest.mark.parametrize(
    ("asked", "ways"),
    [
        ({"cpu_fast_paths": "auto", "batch_tokens": 512}, {"attention": "in blocks", "products": "in float32"}),
        ({"cpu_fast_paths": "auto", "exact": True}, {}),
        ({"cpu_fast_paths": "auto", "batch_tokens": 512, "attention": "sdpa"}, {"products": "in float32"}),
        ({"cpu_fast_paths": "off", "batch_tokens": 512}, {}),
        ({"batch_tokens": 512}, {}),
    ],
    ids=["batched", "exact", "a named attention", "off", "not asked for"],
)
def test_attention_and_products_go_the_faster_way_and_the_header_says_so(
    asked: dict[str, object],
    ways: dict[str, str],
    llama: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In float32 neither is faster, but both are as near to a plain forward as any batch.
    monkeypatch.setattr("hiddentap.models.cpu.switch.blocks_are_faster", lambda *_: True)
    monkeypatch.setattr("hiddentap.models.cpu.switch.float32_is_faster", lambda *_: True)
    source = ModelSource(str(llama), attn_implementation=asked.pop("attention", None))
    capture_dataset(replace(settings(llama, data, tmp_path / "out", **asked), model=source))
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    exact = asked.get("exact", False)
    assert_rows_are_those_of_plain_forwards(tmp_path / "out", model, model.model.norm, exact=exact)
    (shard,) = (tmp_path / "out/shards").glob("*.safetensors")
    with safe_open(shard, "pt") as file:
        made_with = json.loads(file.metadata()["hiddentap"])["metadata"]["made_with"]
    assert {name: made_with[name] for name in ("attention", "products") if name in made_with} == ways


def test_a_bfloat16_run_computes_products_in_float32_where_that_is_faster(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build_llama(vocab_size=VOCAB, pad_token_id=None).to(torch.bfloat16)
    folder = model_folder(tmp_path / "model", model)
    monkeypatch.setattr("hiddentap.models.cpu.switch.blocks_are_faster", lambda *_: False)
    for faster in (True, False):
        monkeypatch.setattr("hiddentap.models.cpu.switch.float32_is_faster", lambda *_, faster=faster: faster)
        with SeenProducts(("linear",)) as seen:
            out = tmp_path / f"out-{faster}"
            capture_dataset(settings(folder, data, out, batch_tokens=512, cpu_fast_paths="auto"))
        assert (torch.float32 in seen.dtypes) is faster


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's here")
def test_free_memory_goes_back_between_forwards(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(KeptMemory, "tidy", lambda _: calls.append(1))
    capture_dataset(settings(llama, data, tmp_path / "off", exact=True))
    assert calls == []
    capture_dataset(settings(llama, data, tmp_path / "auto", exact=True, cpu_fast_paths="auto"))
    assert len(calls) == len(CHATS)


@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name != "llama"])
def test_every_family_is_exact(name: str, data: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tiny.build(name, vocab_size=VOCAB, pad_token_id=None))
    capture_dataset(settings(folder, data, tmp_path / "out", exact=True))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    assert_rows_are_those_of_plain_forwards(tmp_path / "out", model, norm, exact=True)


def test_kimi_k25_is_captured_with_text_alone(data: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tiny.build_kimi_k25(vocab_size=VOCAB + 1, pad_token_id=None))
    capture_dataset(settings(folder, data, tmp_path / "out", exact=True))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert_rows_are_those_of_plain_forwards(tmp_path / "out", model, model.model.language_model.norm, exact=True)
    with safe_open(tmp_path / "out/shards/shard-000000.safetensors", "pt") as shard:
        taps = json.loads(shard.metadata()["hiddentap"])["metadata"]["taps"]
    assert taps["layers_path"] == "model.language_model.layers"


def test_token_ids_and_masks_are_those_of_one_full_rendering(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(llama)
    dataset = CapturedDataset(tmp_path / "out")
    assert [dataset[i]["sample_id"] for i in range(5)] == ["a", "b", "c", "d", "e"]
    for i, row in enumerate(CHATS):
        item = dataset[i]
        assert (
            item["input_ids"].tolist() == tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        )
        supervised = item["input_ids"][item["loss_mask"].bool()]
        assert tokenizer.decode(supervised) == row["messages"][1]["content"] + "<|im_end|>"


def test_the_header_alone_says_what_the_shard_holds(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", final="pre", store_dtype="bfloat16"))
    with safe_open(tmp_path / "out/shards/shard-000000.safetensors", "pt") as shard:
        assert {"aux_hidden_states", "pre_norm", "input_ids", "loss_mask", "row_offsets", "sample_index"} <= set(
            shard.keys()
        )
        assert list(shard.metadata()) == ["hiddentap"]
        about = json.loads(shard.metadata()["hiddentap"])["metadata"]
        rows = shard.get_slice("aux_hidden_states").get_shape()[0]
        assert shard.get_slice("aux_hidden_states").get_shape() == [rows, 3, 32]
        assert shard.get_slice("pre_norm").get_dtype() == "BF16"
    assert about["taps"] == {
        "convention": "layer_output", "layer_ids": [0, 2, 3], "boundaries": [1, 3, 4], "final": "pre",
        "num_hidden_layers": 4, "hidden_size": 32, "layers_path": "model.layers", "norm_path": "model.norm",
        "adapter": None,
    }  # fmt: skip
    assert about["model"]["class"] == "LlamaForCausalLM"
    assert (about["compute_dtype"], about["store_dtype"], about["mode"]) == ("float32", "bfloat16", "batched")
    assert (about["attn_implementation"], about["format_version"]) == ("sdpa", 1)
    assert about["mask_rules"] == {"substitution": 5}
    assert about["tokenisation"]["mask_rule"] == "substitution"
    assert {"torch", "transformers", "safetensors", "threads", "compiled"} <= set(about["made_with"])


def test_boundary_ids_name_the_same_layers(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "a", layer_ids=(0, 3), final="none"))
    capture_dataset(settings(llama, data, tmp_path / "b", layer_ids=(1, 4), final="none", convention="boundary"))
    a, b = CapturedDataset(tmp_path / "a"), CapturedDataset(tmp_path / "b")
    assert all(torch.equal(a[i]["aux_hidden_states"], b[i]["aux_hidden_states"]) for i in range(5))


def test_shards_are_cut_by_rows_and_batch_sizes_change_nothing_in_an_exact_run(
    llama: Path, data: Path, tmp_path: Path
) -> None:
    one = capture_dataset(settings(llama, data, tmp_path / "one", exact=True))
    many = capture_dataset(settings(llama, data, tmp_path / "many", exact=True, shard_rows=100))
    assert (one.shards, many.shards > 1) == (1, True)
    a, b = CapturedDataset(tmp_path / "one"), CapturedDataset(tmp_path / "many")
    assert all(torch.equal(a[i]["aux_hidden_states"], b[i]["aux_hidden_states"]) for i in range(5))


def test_every_row_ends_captured_or_rejected_with_its_line(llama: Path, tmp_path: Path) -> None:
    lines = [json.dumps(CHATS[0]), "{bad", json.dumps({"id": "x"}), json.dumps(chat("Hi", "Ho", id="y"))]
    data = tmp_path / "mixed.jsonl"
    data.write_text("\n".join(lines))
    summary = capture_dataset(settings(llama, data, tmp_path / "out"))
    assert (summary.captured, summary.rejected) == (2, 2)
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(r["line"], r["source"]) for r in rejects] == [(2, str(data)), (3, str(data))]
    assert all(r["reason"] for r in rejects)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["complete"], manifest["counts"]["captured"], manifest["counts"]["rejected"]) == (True, 2, 2)


def test_strict_ends_at_the_first_reject_and_leaves_no_plan(llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "mixed.jsonl"
    data.write_text(json.dumps(CHATS[0]) + "\n{bad\n")
    with pytest.raises(RunError, match=r"mixed\.jsonl, line 2: .*strict"):
        capture_dataset(settings(llama, data, tmp_path / "out", text=TextSettings(strict=True)))
    assert not (tmp_path / "out/plan/plan.json").exists()


class Poison:
    """Changes what one decoder layer gives out, for samples that begin as told."""

    def __init__(self, change) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return self.change(output)


def poisoned(monkeypatch: pytest.MonkeyPatch, layer: int, change) -> None:
    """Make the loaded model's layer give out `change(output)` in batches of one sample of 20 tokens or more."""
    from hiddentap.capture.run.engines.hugging_face import backend as hugging_face_backend

    load = hugging_face_backend.load_model

    def load_poisoned(*arguments: object) -> object:
        loaded = load(*arguments)
        loaded.model.model.layers[layer].register_forward_hook(Poison(change))
        return loaded

    monkeypatch.setattr(hugging_face_backend, "load_model", load_poisoned)


def lengths_of(llama: Path) -> dict[str, int]:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    return {
        row["id"]: len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]) for row in CHATS
    }


def test_a_sample_with_inf_is_rejected_with_layer_token_and_count(llama, data, tmp_path, monkeypatch) -> None:
    longest = lengths_of(llama)["c"]

    def put_inf(output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] == longest:
            output = output.clone()
            output[0, 4, 7] = torch.inf
        return output

    poisoned(monkeypatch, 2, put_inf)
    summary = capture_dataset(settings(llama, data, tmp_path / "out", exact=True, final="none", layer_ids=(0, 2)))
    assert (summary.captured, summary.rejected, summary.rejected_by_code) == (4, 1, {"bad_values": 1})
    dataset = CapturedDataset(tmp_path / "out")
    assert [dataset[i]["sample_id"] for i in range(4)] == ["a", "b", "d", "e"]
    (line,) = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    reject = json.loads(line)
    assert reject["id"] == "c"
    assert reject["reason"] == "values that are not finite at layer 2: 1 row(s), the first at token 4"


def test_zero_rows_reject_raise_or_stay_as_asked(llama, data, tmp_path, monkeypatch) -> None:
    longest = lengths_of(llama)["c"]

    def put_zeros(output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] == longest:
            output = output.clone()
            output[0, 5:9] = 0.0
        return output

    poisoned(monkeypatch, 2, put_zeros)
    same = {"exact": True, "final": "none", "layer_ids": (0, 2)}
    rejecting = capture_dataset(settings(llama, data, tmp_path / "reject", **same))
    assert rejecting.rejected_by_code == {"bad_values": 1}
    assert (
        "rows that are all zero at layer 2: 4 row(s), the first at token 5"
        in (tmp_path / "reject/rejects.jsonl").read_text()
    )
    with pytest.raises(RunError, match="sample 'c': rows that are all zero at layer 2"):
        capture_dataset(settings(llama, data, tmp_path / "raise", on_bad_values="raise", **same))
    keeping = capture_dataset(settings(llama, data, tmp_path / "keep", on_bad_values="keep", **same))
    assert (keeping.captured, keeping.rejected) == (5, 0)


def test_values_that_overflow_when_narrowed_are_rejected(llama, data, tmp_path, monkeypatch) -> None:
    longest = lengths_of(llama)["c"]

    def enlarge(output: torch.Tensor) -> torch.Tensor:
        return output + 1e5 * (output.shape[1] == longest)

    poisoned(monkeypatch, 2, enlarge)
    summary = capture_dataset(
        settings(llama, data, tmp_path / "out", exact=True, final="none", layer_ids=(0, 2), store_dtype="float16")
    )
    assert (summary.captured, summary.rejected_by_code) == (4, {"bad_values": 1})
    assert "became infinite when stored as float16 at layer 2" in (tmp_path / "out/rejects.jsonl").read_text()


def test_a_second_run_on_a_finished_folder_does_nothing(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", shard_rows=100))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/shards").iterdir()}
    again = capture_dataset(settings(llama, data, tmp_path / "out", shard_rows=100))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out/shards").iterdir()} == before
    assert (again.captured, again.tokens_now, again.shards_done_before) == (5, 0, again.shards)


def test_a_damaged_shard_is_made_again_and_the_others_stay(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", exact=True, shard_rows=100))
    shards = sorted((tmp_path / "out/shards").iterdir())
    contents = {p.name: p.read_bytes() for p in shards}
    untouched = shards[0].stat().st_mtime_ns
    with shards[1].open("r+b") as file:
        file.truncate(100)
    capture_dataset(settings(llama, data, tmp_path / "out", exact=True, shard_rows=100))
    assert {p.name: p.read_bytes() for p in shards} == contents
    assert shards[0].stat().st_mtime_ns == untouched


def test_another_run_on_the_same_folder_is_refused_with_what_differs(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    with pytest.raises(UsageError) as caught:
        capture_dataset(settings(llama, data, tmp_path / "out", layer_ids=(0, 1)))
    assert "taps.layer_ids: [0, 2, 3] -> [0, 1]" in str(caught.value)
    write_rows(data, CHATS[:3])
    with pytest.raises(UsageError, match="data"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_shards_that_no_plan_speaks_of_are_never_written_over(llama: Path, data: Path, tmp_path: Path) -> None:
    import shutil

    capture_dataset(settings(llama, data, tmp_path / "out"))
    shutil.rmtree(tmp_path / "out/plan")
    before = (tmp_path / "out/shards/shard-000000.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"holds 1 shard\(s\) and no plan"):
        capture_dataset(settings(llama, data, tmp_path / "out", layer_ids=(1,)))
    assert (tmp_path / "out/shards/shard-000000.safetensors").read_bytes() == before


def test_a_sealed_shard_of_other_layers_does_not_count_as_done(llama: Path, data: Path, tmp_path: Path) -> None:
    import shutil

    capture_dataset(settings(llama, data, tmp_path / "a", exact=True))
    capture_dataset(settings(llama, data, tmp_path / "b", exact=True, layer_ids=(1,), final="none"))
    shard = "shards/shard-000000.safetensors"
    right = (tmp_path / "b" / shard).read_bytes()
    shutil.copy(tmp_path / "a" / shard, tmp_path / "b" / shard)
    again = capture_dataset(settings(llama, data, tmp_path / "b", exact=True, layer_ids=(1,), final="none"))
    assert again.shards_done_before == 0
    assert (tmp_path / "b" / shard).read_bytes() == right


def test_a_folder_that_misses_a_shard_is_never_called_complete(
    llama: Path, data: Path, tmp_path: Path, monkeypatch
) -> None:
    from hiddentap.capture.run.shard_run import ShardRun

    monkeypatch.setattr(ShardRun, "capture", lambda self, shards: None)
    with pytest.raises(RunError, match="has 0 of the 1 shards of its plan"):
        capture_dataset(settings(llama, data, tmp_path / "out"))
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_a_word(llama, data, tmp_path, monkeypatch) -> None:
    from hiddentap.capture.run.pacing import pace
    from hiddentap.capture.run.pacing.speeds import Speed

    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(pace.Pace, "measured", Speed(1024, 0.1))
    assert capture_dataset(settings(llama, data, tmp_path / "out")).captured == 5
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is True


def test_the_same_data_and_model_under_another_name_go_on(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved").symlink_to(llama)
    again = capture_dataset(settings(Path("moved"), Path(data.name), tmp_path / "out"))
    assert (again.captured, again.shards_done_before) == (5, 1)


def test_more_top_logits_than_there_are_is_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"top_logits is 300, but the model has 259 logits"):
        capture_dataset(settings(llama, data, tmp_path / "out", top_logits=300))


def test_an_unsealed_shard_is_refused_by_safetensors(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    from hiddentap.capture.store import PlannedShardWriter

    monkeypatch.setattr(PlannedShardWriter, "discard", lambda self: None)
    monkeypatch.setattr(PlannedShardWriter, "seal", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture_dataset(settings(llama, data, tmp_path / "out"))
    (unsealed,) = (tmp_path / "out/shards").iterdir()
    with pytest.raises(Exception, match=r"(?i)header"), safe_open(unsealed, "pt"):
        pass


def test_the_head_turns_stored_rows_into_the_models_logits(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", exact=True, final="pre", head=True))
    head = load_head(tmp_path / "out/head")
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    item = CapturedDataset(tmp_path / "out")[2]
    with torch.no_grad():
        logits = model(item["input_ids"][None], use_cache=False).logits[0]
    assert torch.equal(head.lm_head(head.norm(item["pre_norm"])), logits)
    assert torch.equal(head.embeddings(item["input_ids"]), model.get_input_embeddings()(item["input_ids"]))


HEADS = {
    "llama": {},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "cohere": {},
    "granite": {"logits_scaling": 3.0},
}


@pytest.mark.parametrize("family", HEADS)
def test_top_logits_are_those_of_the_model_with_the_sum_of_all(family: str, data: Path, tmp_path: Path) -> None:
    """Heads that are plain, soft-capped, multiplied, divided."""
    model = tiny.build_type(family, vocab_size=VOCAB, pad_token_id=None, **HEADS[family])
    folder = model_folder(tmp_path / "model", model)
    capture_dataset(settings(folder, data, tmp_path / "out", exact=True, final="none", top_logits=7))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    dataset = CapturedDataset(tmp_path / "out")
    for item in (dataset[i] for i in range(len(dataset))):
        with torch.no_grad():
            logits = model(item["input_ids"][None], use_cache=False).logits[0]
        values, ids = logits.topk(7)
        torch.testing.assert_close(item["topk_logits"], values, atol=1e-5, rtol=1e-5)
        assert torch.equal(item["topk_ids"].long(), ids)
        torch.testing.assert_close(item["topk_logsumexp"], logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
        assert "post_norm" not in item


def test_ids_beyond_the_embedding_are_rejected_before_any_forward(llama: Path, tmp_path: Path) -> None:
    rows = [
        {"id": "good", "input_ids": [5, 6, 7]},
        {"id": "bad", "input_ids": [5, VOCAB]},
        {"id": "negative", "input_ids": [-1]},
    ]
    data = write_rows(tmp_path / "ids.jsonl", rows)
    summary = capture_dataset(settings(llama, data, tmp_path / "out"))
    assert (summary.captured, summary.rejected) == (1, 2)
    assert CapturedDataset(tmp_path / "out")[0]["loss_mask"].tolist() == [1, 1, 1]


def test_odd_ids_are_kept_as_data_and_name_no_file(llama: Path, tmp_path: Path) -> None:
    ids = ["../../etc/passwd", "a/b", "x" * 300, "same", "same", ""]
    data = write_rows(
        tmp_path / "odd.jsonl", [chat("Hi", "Ho", id=i) for i in ids] + [chat("Hi", "Ho"), chat("Hi", "Ho", id=7)]
    )
    capture_dataset(settings(llama, data, tmp_path / "out"))
    dataset = CapturedDataset(tmp_path / "out")
    found = Counter(dataset[i]["sample_id"] for i in range(len(dataset)))
    assert found["../../etc/passwd"] == found["x" * 300] == 1
    assert found["same"] == 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        ".hiddentap-lock", "manifest.json", "plan", "rejects.jsonl", "shards",
    }  # fmt: skip


def test_a_run_goes_on_at_the_shard_that_failed(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine

    forward, calls = HuggingFaceEngine.forward, []

    def failing(self, batch):
        calls.append(1)
        if len(calls) == 4:
            raise RunError("the device is gone")
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceEngine, "forward", failing)
    same = {"exact": True, "shard_rows": 100}
    with pytest.raises(RunError, match="the device is gone"):
        capture_dataset(settings(llama, data, tmp_path / "out", **same))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["complete"] is False
    with pytest.raises(Exception, match=r"not complete|incomplete"):
        CapturedDataset(tmp_path / "out")
    assert all(p.suffix == ".safetensors" for p in (tmp_path / "out/shards").iterdir())
    resumed = capture_dataset(settings(llama, data, tmp_path / "out", **same))
    assert resumed.captured == 5
    capture_dataset(settings(llama, data, tmp_path / "whole", **same))
    for shard in (tmp_path / "out/shards").iterdir():
        assert shard.read_bytes() == (tmp_path / "whole/shards" / shard.name).read_bytes()


def test_settings_that_make_no_sense_are_refused(llama: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no data was given"):
        CaptureSettings(model=ModelSource("m"), data=(), out=tmp_path, layer_ids=(1,))
    with pytest.raises(UsageError, match="exact runs one sample a forward"):
        settings(llama, data, tmp_path, exact=True, batch_tokens=5)
    with pytest.raises(UsageError, match="store_dtype must be one of"):
        settings(llama, data, tmp_path, store_dtype="int8")
    with pytest.raises(UsageError, match="max_length must be at least 1"):
        TextSettings(max_length=0)


def test_a_tap_that_is_not_true_ends_the_run_before_anything_is_written(llama, data, tmp_path, monkeypatch) -> None:
    from hiddentap.capture.run.engines.hugging_face import backend as hugging_face_backend

    load = hugging_face_backend.load_model

    def load_with_a_stray_hook(*arguments: object) -> object:
        loaded = load(*arguments)
        loaded.model.model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
        return loaded

    monkeypatch.setattr(hugging_face_backend, "load_model", load_with_a_stray_hook)
    with pytest.raises(TapError, match="boundary 1"):
        capture_dataset(settings(llama, data, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_shard_file_alone_is_a_data_set(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    alone = CapturedDataset(tmp_path / "out/shards/shard-000000.safetensors")
    assert len(alone) == 5
    with tap(AutoModelForCausalLM.from_pretrained(llama).eval(), [0]) as t:
        single = t.run(alone[0]["input_ids"][None]).aux_hidden_states[0][0]
    torch.testing.assert_close(alone[0]["aux_hidden_states"][:, 0], single, atol=1e-5, rtol=1e-5)
    with pytest.raises(ShardError):
        CapturedDataset(tmp_path / "out/manifest.json")


@pytest.mark.parametrize(("adapter", "width"), [("hyper_connections.mean", 1), ("hyper_connections.streams", 4)])
def test_a_model_of_several_streams_is_stored_as_its_adapter_says(
    adapter: str, width: int, data: Path, tmp_path: Path
) -> None:
    from support import architectures

    model = architectures.build("deepseek_v4", vocab_size=VOCAB, pad_token_id=None)
    H = model.get_input_embeddings().weight.shape[1]
    folder = model_folder(tmp_path / "model", model)
    summary = capture_dataset(settings(folder, data, tmp_path / "out", layer_ids=(0, 2), exact=True, adapter=adapter))
    assert summary.captured == 5
    item = CapturedDataset(tmp_path / "out")[0]
    S = len(item["input_ids"])
    assert tuple(item["aux_hidden_states"].shape) == (S, 2, width * H)
    assert tuple(item["pre_norm"].shape) == tuple(item["post_norm"].shape) == (S, H)
    layer_outputs: list[torch.Tensor] = []
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded.model.layers[2].register_forward_hook(lambda module, args, output: layer_outputs.append(output))
    with torch.no_grad():
        loaded(item["input_ids"][None], use_cache=False)
    streams = layer_outputs[0] if isinstance(layer_outputs[0], torch.Tensor) else layer_outputs[0][0]
    expected = streams.mean(2) if width == 1 else streams.flatten(2)
    assert torch.equal(item["aux_hidden_states"][:, 1], expected[0])
    with pytest.raises(TapError, match="hyper_connections"):
        capture_dataset(settings(folder, data, tmp_path / "plain", layer_ids=(0, 2)))


def test_a_model_that_is_not_causal_is_refused_in_batches_and_right_one_by_one(data: Path, tmp_path: Path) -> None:
    model = tiny.build_type("bert", vocab_size=VOCAB, pad_token_id=None, is_decoder=False)
    folder = model_folder(tmp_path / "model", model)
    same = {"layer_ids": (0, 2), "final": "none"}
    with pytest.raises(TapError, match=r"is not causal as it is configured.*--exact"):
        capture_dataset(settings(folder, data, tmp_path / "batched", **same))
    capture_dataset(settings(folder, data, tmp_path / "exact", exact=True, **same))
    item = CapturedDataset(tmp_path / "exact")[0]
    hs = plain_states(AutoModelForCausalLM.from_pretrained(folder).eval(), item["input_ids"])
    assert torch.equal(item["aux_hidden_states"][:, 1], hs[3][0])


def test_samples_are_held_to_the_positions_that_the_model_has(tmp_path: Path) -> None:
    gpt2 = tiny.build("gpt2", vocab_size=VOCAB)
    folder = model_folder(tmp_path / "model", gpt2)
    rows = write_rows(tmp_path / "long.jsonl", [chat("Q?", "A" * 900, id="long"), *CHATS])
    summary = capture_dataset(settings(folder, rows, tmp_path / "out"))
    assert (summary.captured, summary.truncated) == (6, 1)
    assert len(CapturedDataset(tmp_path / "out")[0]["input_ids"]) == 256


def test_data_that_changes_while_it_is_read_ends_the_run(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    from hiddentap.capture.run import planning

    tokenise = planning.tokenise

    def changing(*args, **kwargs):
        yield from tokenise(*args, **kwargs)
        write_rows(data, CHATS[:2])

    monkeypatch.setattr(planning, "tokenise", changing)
    with pytest.raises(RunError, match="the data changed while it was read"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


def test_weights_that_change_under_a_run_leave_it_incomplete(data: Path, tmp_path: Path, monkeypatch) -> None:
    from hiddentap.capture.run import offline

    folder = llama_folder(tmp_path / "model")
    fill = offline._DatasetRun._fill

    def changing(*args):
        done = fill(*args)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-8, 2)
            file.write(b"\x01" * 8)
        return done

    monkeypatch.setattr(offline._DatasetRun, "_fill", changing)
    with pytest.raises(RunError, match="changed while they were in use"):
        capture_dataset(settings(folder, data, tmp_path / "out"))
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False
