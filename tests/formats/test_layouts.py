"""Every layout, read by small readers of its description and compared with a plain forward of the model."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hiddentap.capture.formats import ExportSettings, export_dataset
from support.layout_readers import arrow_rows, container, containers, deepspec_cache, padded_shards
from support.model_folder import VOCAB
from support.trainer_dump import CONSECUTIVE, IDS, LONG_ID, Expected, H, read_jsonl

BOUNDARIES = (2, 4, 5)


def exported(dump: Path, dest: Path, to: str, **options: object) -> Path:
    export_dataset(ExportSettings(dump, to, dest, **options))
    return dest


def file_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def of(expected: list[Expected], ids: list[str]) -> list[Expected]:
    return [sample for sample in expected if sample.sample_id in ids]


def assert_equal(found: torch.Tensor, due: torch.Tensor) -> None:
    assert found.dtype == due.dtype
    assert found.shape == due.shape
    assert torch.equal(found, due)


def test_specforge_eagle3_holds_three_layers_and_post_norm_behind_a_dimension_of_one(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3")
    found = containers(dest, ".ckpt")
    assert len(found) == len(expected) == 5
    for values, sample in zip(found, expected, strict=True):
        assert set(values) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
        assert_equal(values["input_ids"], sample.input_ids)
        assert_equal(values["loss_mask"], sample.loss_mask)
        assert_equal(values["aux_hidden_state"], sample.side_by_side(*BOUNDARIES)[None])
        assert_equal(values["hidden_state"], sample.post[None])


def test_specforge_groups_files_by_number_with_zeros(dump, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3")
    assert file_names(dest) == {
        *(f"rows_00000000-00002000/data_0000000{i}.ckpt" for i in range(5)),
        "vocab_mapping/vocab_mapping.pt",
        "hiddentap-export.json",
        "hiddentap-export.sha256",
        "hiddentap-samples.jsonl",
        ".hiddentap-lock",
    }


@pytest.mark.parametrize("algorithm", ["dflash", "domino"])
def test_specforge_dflash_leaves_out_samples_without_two_supervised_tokens_in_a_row(
    dump, expected, tmp_path, algorithm: str
) -> None:
    dest = exported(dump, tmp_path / "d", "specforge", algorithm=algorithm)
    found = containers(dest, ".ckpt")
    due = of(expected, CONSECUTIVE)
    assert len(found) == len(due) == 3
    for values, sample in zip(found, due, strict=True):
        assert set(values) == {"input_ids", "loss_mask", "hidden_states"}
        assert_equal(values["hidden_states"], sample.side_by_side(*BOUNDARIES)[None])


def test_specforge_dspark_has_the_last_states_too_and_may_be_compressed(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="dspark", compress=True)
    assert "rows_00000000-00002000/data_00000002.ckpt.gz" in file_names(dest)
    found = containers(dest, ".ckpt.gz")
    for values, sample in zip(found, of(expected, CONSECUTIVE), strict=True):
        assert set(values) == {"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"}
        assert_equal(values["target_last_hidden_states"], sample.post[None])


def test_specforge_vocabulary_adds_an_offset_and_marks_what_can_be_said(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3", draft_vocab_size=20)
    mapping = container(dest / "vocab_mapping/vocab_mapping.pt")
    counts: dict[int, int] = {}
    for sample in expected:
        for token, marked in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            counts[token] = counts.get(token, 0) + marked
    frequent = sorted(range(VOCAB), key=lambda token: (-counts.get(token, 0), token))[:20]
    assert (mapping["d2t"].dtype, mapping["t2d"].dtype) == (torch.int64, torch.bool)
    assert (torch.arange(20) + mapping["d2t"]).tolist() == sorted(frequent)
    assert mapping["t2d"].nonzero()[:, 0].tolist() == sorted(frequent)
    assert len(mapping["t2d"]) == VOCAB


def test_specforge_without_a_draft_vocabulary_maps_every_token_to_itself(dump, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3")
    mapping = container(dest / "vocab_mapping/vocab_mapping.pt")
    assert mapping["d2t"].tolist() == [0] * VOCAB
    assert mapping["t2d"].all()


def test_angelslim_eagle3_has_a_batch_dimension_everywhere(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "angelslim", algorithm="eagle3", draft_vocab_size=20)
    assert "rank_0/rows_00000000-00005000/data_00000004.ckpt" in file_names(dest)
    assert container(dest / "vocab_mapping.pt")["d2t"].shape == (20,)
    for values, sample in zip(containers(dest, ".ckpt"), expected, strict=True):
        assert set(values) == {"input_ids", "loss_mask", "hidden_states", "target_hiddens"}
        assert_equal(values["input_ids"], sample.input_ids[None])
        assert_equal(values["loss_mask"], sample.loss_mask[None])
        assert_equal(values["hidden_states"], sample.side_by_side(*BOUNDARIES)[None])
        assert_equal(values["target_hiddens"], sample.post[None])


def test_angelslim_dflash_has_no_last_states(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "angelslim", algorithm="dflash")
    assert "shard_00000/sample_00000004_rank0.ckpt" in file_names(dest)
    for values, sample in zip(containers(dest, ".ckpt"), expected, strict=True):
        assert set(values) == {"input_ids", "loss_mask", "hidden_states", "attention_mask"}
        assert_equal(values["hidden_states"], sample.side_by_side(*BOUNDARIES)[None])
        assert values["attention_mask"].tolist() == [[1] * sample.S]


def test_eagle1_holds_post_norm_as_float16(dump32, expected32, tmp_path) -> None:
    dest = exported(dump32, tmp_path / "d", "eagle1")
    assert sorted(file_names(dest / "data")) == [f"000000/data_0000000{i}.ckpt" for i in range(5)]
    for values, sample in zip(containers(dest, ".ckpt"), expected32, strict=True):
        assert set(values) == {"input_ids", "hidden_state", "loss_mask"}
        assert_equal(values["hidden_state"], sample.post.half())


def test_modelopt_keeps_the_dtype_and_the_id_inside(dump32, expected32, tmp_path) -> None:
    dest = exported(dump32, tmp_path / "d", "modelopt")
    assert {name for name in file_names(dest) if name.endswith(".pt")} == {f"0000000{i}.pt" for i in range(5)}
    for values, sample in zip(containers(dest, ".pt"), expected32, strict=True):
        assert set(values) == {"input_ids", "hidden_states", "aux_hidden_states", "loss_mask", "conversation_id"}
        assert values["conversation_id"] == sample.sample_id
        assert_equal(values["hidden_states"], sample.post)
        assert_equal(values["aux_hidden_states"], sample.side_by_side(*BOUNDARIES))


def test_modelopt_marks_pre_norm(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "modelopt", norm="pre")
    for values, sample in zip(containers(dest, ".pt"), expected, strict=True):
        assert values["hidden_states_prenorm"] is True
        assert_equal(values["hidden_states"], sample.pre)


def test_speculators_stacks_boundaries_and_pre_norm(dump, expected, tmp_path) -> None:
    pytest.importorskip("datasets")
    dest = exported(dump, tmp_path / "d", "speculators", draft_vocab_size=20)
    rows = arrow_rows(dest)
    assert json.loads((dest / "state.json").read_text())["_format_type"] == "torch"
    assert len(rows) == 5
    for number, (row, sample) in enumerate(zip(rows, expected, strict=True)):
        assert row == {
            "input_ids": sample.input_ids.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
            "seq_len": sample.S,
        }
        found = load_file(dest / "hidden_states" / f"hs_{number}.safetensors")
        assert set(found) == {"hidden_states", "token_ids"}
        assert_equal(found["token_ids"], sample.input_ids)
        due = torch.stack([sample.states[2], sample.states[4], sample.states[5], sample.pre], 1)
        assert_equal(found["hidden_states"], due)


def test_speculators_counts_supervised_tokens(dump, expected, tmp_path) -> None:
    pytest.importorskip("datasets")
    dest = exported(dump, tmp_path / "d", "speculators", draft_vocab_size=20)
    counts: dict[int, int] = {}
    for sample in expected:
        for token in sample.input_ids[sample.loss_mask == 1].tolist():
            counts[token] = counts.get(token, 0) + 1
    assert container(dest / "token_freq.pt") == counts
    d2t, t2d = np.load(dest / "d2t.npy"), np.load(dest / "t2d.npy")
    assert (np.arange(20) + d2t).tolist() == np.flatnonzero(t2d).tolist()
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (np.int64, np.bool_, (VOCAB,))


def test_deepspec_is_raw_arrays_found_by_a_table_of_56_bytes_a_sample(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "deepspec", shard_size=2, target_model="org/target")
    manifest, samples = deepspec_cache(dest)
    assert manifest == {
        "version": 2, "num_samples": 5, "num_shards": 3, "target_layer_ids": [1, 3, 4], "hidden_dtype": "bfloat16",
        "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56, "hidden_size": H,
        "target_model_name_or_path": "org/target", "min_loss_tokens": 1,
        "shards": [{"shard_id": k, "file_name": f"shard-0000{k}.bin"} for k in range(3)],
    }  # fmt: skip
    assert (dest / "samples.idx").stat().st_size == 56 * 5
    for number, (found, sample) in enumerate(zip(samples, expected, strict=True)):
        assert (found["sample_id"], found["shard_id"]) == (number, number // 2)
        assert found["input_ids"] == sample.input_ids.tolist()
        assert found["attention_mask"] == [1] * sample.S
        assert found["loss_mask"] == sample.loss_mask.tolist()
        assert_equal(found["target_hidden_states"], sample.side_by_side(*BOUNDARIES))
        assert_equal(found["target_last_hidden_states"], sample.post)
    ends = {found["shard_id"]: found["end"] for found in samples}
    assert ends == {k: (dest / f"shard-0000{k}.bin").stat().st_size for k in range(3)}


def test_deepspec_arrays_follow_each_other_in_the_order_of_the_table(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "deepspec")
    *_, first, attention, mask, aux, last = struct.unpack("<QIIQQQQQ", (dest / "samples.idx").read_bytes()[:56])
    S = expected[0].S
    assert (first, attention, mask, aux, last) == (0, 4 * S, 5 * S, 6 * S, 6 * S + 2 * S * 3 * H)


def test_deepspec_calls_the_embeddings_minus_one(captured, expected, tmp_path) -> None:
    dump = captured("out", (0, 3), convention="boundary")
    manifest, samples = deepspec_cache(exported(dump, tmp_path / "d", "deepspec"))
    assert manifest["target_layer_ids"] == [-1, 2]
    assert_equal(samples[1]["target_hidden_states"], expected[1].side_by_side(0, 3))


def test_automodel_dspark_pads_every_sample_to_one_length(dump, expected, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "automodel-dspark", seq_length=30, shard_size=2, target_model="org/target")
    manifest, found, sizes = padded_shards(dest)
    assert sizes == [2, 2, 1]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "input_ids": (torch.int64, (5, 30)),
        "loss_mask": (torch.int64, (5, 30)),
        "target_hidden_states": (torch.bfloat16, (5, 30, 3 * H)),
        "target_last_hidden_states": (torch.bfloat16, (5, 30, H)),
    }
    for i, sample in enumerate(expected):
        assert torch.equal(found["input_ids"][i, : sample.S], sample.input_ids)
        assert torch.equal(found["loss_mask"][i, : sample.S], sample.loss_mask)
        assert torch.equal(found["target_hidden_states"][i, : sample.S], sample.side_by_side(*BOUNDARIES))
        assert torch.equal(found["target_last_hidden_states"][i, : sample.S], sample.post)
        assert not any(tensor[i, sample.S :].any() for tensor in found.values())
    template = manifest.pop("chat_template_sha256")
    assert len(bytes.fromhex(template)) == 32
    assert manifest == {
        "format_version": 1, "complete": True, "target_model": "org/target", "target_model_type": "llama",
        "target_vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": 8, "seq_length": 30, "dtype": "bf16",
        "num_samples": 5, "shard_size": 2, "target_hidden_dim": 3 * H, "target_last_hidden_dim": H,
        "target_layer_ids": [1, 3, 4], "train_data_path": manifest["train_data_path"], "train_split": None,
        "shuffle_seed": 0, "mask_reasoning_content": False,
    }  # fmt: skip
    assert manifest["train_data_path"].endswith("rows.jsonl")


def test_automodel_dspark_has_the_weights_of_both_ends(dump, target, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "automodel-dspark")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    found = load_file(dest / "target_weights.safetensors")
    assert set(found) == {"embed_tokens.weight", "lm_head.weight"}
    assert_equal(found["embed_tokens.weight"], model.model.embed_tokens.weight.detach())
    assert_equal(found["lm_head.weight"], model.lm_head.weight.detach())


def test_automodel_dspark_means_post_norm_by_the_last_layer(captured, expected, tmp_path) -> None:
    dump = captured("out", (2, 7))
    manifest, found, _ = padded_shards(exported(dump, tmp_path / "d", "automodel-dspark"))
    assert manifest["target_layer_ids"] == [2, 7]
    for i, sample in enumerate(expected):
        assert torch.equal(found["target_hidden_states"][i, : sample.S, :H], sample.states[3])
        assert torch.equal(found["target_hidden_states"][i, : sample.S, H:], sample.post)


def test_automodel_dspark_cuts_longer_samples_and_leaves_out_what_is_not_supervised_then(
    dump, expected, tmp_path
) -> None:
    summary = export_dataset(ExportSettings(dump, "automodel-dspark", tmp_path / "d", seq_length=6))
    _, found, _ = padded_shards(tmp_path / "d")
    assert (summary.samples, summary.truncated, summary.left_out) == (4, 2, {"fewer than 1 supervised tokens": 1})
    assert [line["id"] for line in read_jsonl(tmp_path / "d/hiddentap-samples.jsonl")] == [IDS[i] for i in (0, 1, 2, 4)]
    assert torch.equal(found["target_last_hidden_states"][1], expected[1].post[:6])


def shifted(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*values.tolist()[1:], 0])


def test_automodel_eagle3_shifts_inputs_and_gives_the_next_tokens_distribution(dump32, expected32, tmp_path) -> None:
    dest = exported(dump32, tmp_path / "d", "automodel-eagle3", draft_vocab_size=200, shard_size=4)
    manifest, found, sizes = padded_shards(dest)
    assert sizes == [4, 1]
    T, token_ids = 23, torch.tensor(manifest["selected_token_ids"])
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        **dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), (torch.int64, (5, T))),
        "aux_hidden_states": (torch.float32, (5, T, 3 * H)),
        "position_mask": (torch.bool, (5, T, 1)),
        "target_probs": (torch.float32, (5, T, 200)),
    }
    for i, sample in enumerate(expected32):
        S = sample.S
        assert torch.equal(found["input_ids"][i, :S], shifted(sample.input_ids))
        assert torch.equal(found["loss_mask"][i, :S], shifted(sample.loss_mask))
        assert found["attention_mask"][i].tolist() == [1] * S + [0] * (T - S)
        assert torch.equal(found["aux_hidden_states"][i, :S], sample.side_by_side(*BOUNDARIES))
        due = torch.softmax(sample.logits[1:, token_ids], -1)
        torch.testing.assert_close(found["target_probs"][i, : S - 1], due, atol=1e-6, rtol=1e-5)
        sayable = torch.isin(sample.logits[1:].argmax(-1), token_ids) & (sample.loss_mask[1:] == 1)
        assert found["position_mask"][i, : S - 1, 0].tolist() == sayable.tolist()
        assert not any(found[name][i, S - 1 :].any() for name in ("target_probs", "position_mask", "loss_mask"))


def test_automodel_eagle3_has_a_supervised_position_that_the_draft_cannot_say(dump32, expected32, tmp_path) -> None:
    _, found, _ = padded_shards(exported(dump32, tmp_path / "d", "automodel-eagle3", draft_vocab_size=200))
    supervised = sum(int(sample.loss_mask[1:].sum()) for sample in expected32)
    assert 0 < int(found["position_mask"].sum()) < supervised


def test_automodel_eagle3_manifest_and_embeddings(dump, target, tmp_path) -> None:
    dest = exported(dump, tmp_path / "d", "automodel-eagle3", draft_vocab_size=40, target_model="org/target")
    manifest, *_ = padded_shards(dest)
    token_ids = manifest.pop("selected_token_ids")
    assert len(token_ids) == 40
    assert token_ids == sorted(set(token_ids))
    assert manifest.pop("input_data").endswith("rows.jsonl")
    assert manifest == {
        "format_version": 2, "target_model": "org/target", "target_vocab_size": VOCAB, "draft_vocab_size": 40,
        "seq_length": 23, "dtype": "bf16", "num_samples": 5, "shard_size": 64, "target_probs_topk": 0,
        "aux_hidden_dim": 3 * H, "aux_layer_ids": [1, 3, 4], "split": None, "shuffle_seed": 0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    found = load_file(dest / "target_embeddings.safetensors")
    assert set(found) == {"weight"}
    assert_equal(found["weight"], model.model.embed_tokens.weight.detach().float())


def test_automodel_eagle3_keeps_the_most_likely_tokens_where_asked(dump32, expected32, tmp_path) -> None:
    dest = exported(dump32, tmp_path / "d", "automodel-eagle3", draft_vocab_size=50, target_probs_topk=4)
    manifest, found, _ = padded_shards(dest)
    assert manifest["target_probs_topk"] == 4
    assert "target_probs" not in found
    values, places = found["target_probs_values"], found["target_probs_indices"]
    assert (values.shape[-1], places.shape[-1], places.dtype) == (4, 4, torch.int32)
    token_ids = torch.tensor(manifest["selected_token_ids"])
    for i, sample in enumerate(expected32):
        whole = torch.softmax(sample.logits[1:, token_ids], -1)
        due, order = whole.sort(-1, descending=True)
        torch.testing.assert_close(
            values[i, : sample.S - 1], due[:, :4] / due[:, :4].sum(-1, keepdim=True), atol=1e-6, rtol=1e-5
        )
        assert torch.equal(places[i, : sample.S - 1].long(), order[:, :4])


def test_no_file_name_holds_an_id_and_the_list_says_which_sample_a_number_is(dump, tmp_path) -> None:
    for to, options in (("modelopt", {}), ("specforge", {"algorithm": "eagle3"}), ("deepspec", {})):
        dest = exported(dump, tmp_path / to, to, **options)
        assert not [name for name in file_names(dest) if "passwd" in name or "xxx" in name or "a/b" in name]
        listed = read_jsonl(dest / "hiddentap-samples.jsonl")
        assert [line["id"] for line in listed] == ["../../etc/passwd", "a/b c", "one", LONG_ID, "apart"]
        assert [(line["number"], line["line"]) for line in listed] == [(i, i + 1) for i in range(5)]


def test_post_norm_that_is_stored_is_not_made_again(captured, expected, tmp_path) -> None:
    dump = captured("out", (1, 3, 4), final="post", head=False)
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3", target_vocab_size=VOCAB)
    for values, sample in zip(containers(dest, ".ckpt"), expected, strict=True):
        assert_equal(values["hidden_state"], sample.post[None])


def test_rows_in_float32_are_rounded_for_a_layout_in_bfloat16(dump32, expected32, tmp_path) -> None:
    dest = exported(dump32, tmp_path / "d", "specforge", algorithm="dflash")
    for values, sample in zip(containers(dest, ".ckpt"), of(expected32, CONSECUTIVE), strict=True):
        assert_equal(values["hidden_states"], sample.side_by_side(*BOUNDARIES).bfloat16()[None])
