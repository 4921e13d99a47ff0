"""Our exports in the trainers' own loaders; each test is skipped where that trainer is not installed.

The trainers come with `tests/requirements-peers.txt`. AngelSlim, DeepSpec and EAGLE-1, which cannot be imported
as they are, are in test_peer_code.py.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hiddentap.capture.formats import ExportSettings, export_dataset
from support.model_folder import VOCAB
from support.trainer_dump import CONSECUTIVE, Expected, H

BOUNDARIES = (2, 4, 5)


def exported(dump: Path, dest: Path, to: str, **options: object) -> Path:
    export_dataset(ExportSettings(dump, to, dest, **options))
    return dest


@pytest.fixture(autouse=True)
def quiet_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- SpecForge


def specforge_batches(folder: Path, reader, strategy: str, transform, collate, batch_size: int) -> list:
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    reader.validate_files = True
    refs = reader.read()
    assert len(refs) == len(list(folder.rglob("*.ckpt*")))
    return list(
        FeatureDataLoader(
            LocalFeatureStore("s"), refs=refs, batch_size=batch_size, collate_fn=collate, per_sample_transform=transform,
            strategy=strategy, drop_last=False,
        )
    )  # fmt: skip


def test_specforge_trains_eagle3_on_the_files(dump: Path, expected: list[Expected], tmp_path: Path) -> None:
    eagle3 = pytest.importorskip("specforge.algorithms.eagle3.data")
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3")
    batches = specforge_batches(
        dest,
        eagle3.build_offline_reader(str(dest), run_id="r", ttt_length=7, max_len=2048),
        "eagle3",
        eagle3.build_offline_normalizer(2048),
        eagle3.build_offline_collator(),
        2,
    )
    assert len(batches) == 3
    rows = [(batch.tensors, row) for batch in batches for row in range(len(batch.tensors["input_ids"]))]
    for (tensors, row), sample in zip(rows, expected, strict=True):
        S = sample.S
        assert torch.equal(tensors["input_ids"][row, :S], sample.input_ids)
        assert torch.equal(tensors["hidden_state"][row, :S], sample.side_by_side(*BOUNDARIES))
        assert torch.equal(tensors["target"][row, :S], sample.post)
        assert tensors["loss_mask"][row, :S].flatten().tolist() == [*sample.loss_mask.tolist()[:-1], 0]
        assert tensors["attention_mask"][row].tolist()[:S] == [1] * S


def test_specforge_legacy_data_set_reads_the_files(dump: Path, expected: list[Expected], tmp_path: Path) -> None:
    preprocessing = pytest.importorskip("specforge.data.preprocessing")
    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3", compress=True)
    found = preprocessing.OfflineEagle3Dataset(sorted(map(str, dest.rglob("*.ckpt.gz"))))
    assert len(found) == 5
    for item, sample in zip((found[i] for i in range(5)), expected, strict=True):
        assert torch.equal(item["target"], sample.post[None])


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("algorithm", ["dflash", "domino", "dspark"])
def test_specforge_trains_block_drafters_on_the_files(
    dump: Path, expected: list[Expected], tmp_path: Path, algorithm: str, compress: bool
) -> None:
    family = pytest.importorskip("specforge.algorithms.common.dflash_family_data")
    dest = exported(dump, tmp_path / "d", "specforge", algorithm=algorithm, compress=compress)
    dspark = algorithm == "dspark"
    build_reader = family.build_dspark_offline_reader if dspark else family.build_offline_reader
    build_normalizer = family.build_dspark_offline_normalizer if dspark else family.build_offline_normalizer
    batches = specforge_batches(
        dest,
        build_reader(algorithm, str(dest), run_id="r", ttt_length=1, max_len=2048),
        algorithm,
        build_normalizer(2048),
        family.build_dspark_collator() if dspark else family.build_collator(),
        3,
    )
    (batch,) = batches
    due = [sample for sample in expected if sample.sample_id in CONSECUTIVE]
    assert batch.tensors["input_ids"].shape == (3, 23)
    for row, sample in enumerate(due):
        assert torch.equal(batch.tensors["hidden_states"][row, : sample.S], sample.side_by_side(*BOUNDARIES))
        if dspark:
            assert torch.equal(batch.tensors["target_last_hidden_states"][row, : sample.S], sample.post)
        assert not batch.tensors["hidden_states"][row, sample.S :].any()


def test_specforge_refuses_the_samples_that_the_export_leaves_out(dump: Path, tmp_path: Path) -> None:
    family = pytest.importorskip("specforge.algorithms.common.dflash_family_data")
    dest = exported(dump, tmp_path / "d", "angelslim", algorithm="dflash")
    values = torch.load(dest / "shard_00000/sample_00000004_rank0.ckpt", weights_only=True)
    raw = {
        "input_ids": values["input_ids"][0],
        "loss_mask": values["loss_mask"][0],
        "hidden_states": values["hidden_states"],
    }
    with pytest.raises(ValueError, match="two consecutive supervised tokens"):
        family.normalize_offline_sample(raw, 2048)


def test_specforge_itself_makes_the_same_vocabulary_mapping(
    dump: Path, expected: list[Expected], tmp_path: Path
) -> None:
    preprocessing = pytest.importorskip("specforge.data.preprocessing")
    from collections import Counter

    dest = exported(dump, tmp_path / "d", "specforge", algorithm="eagle3", draft_vocab_size=40)
    found = torch.load(dest / "vocab_mapping/vocab_mapping.pt", weights_only=True)
    counts = Counter(token for sample in expected for token in sample.input_ids[sample.loss_mask == 1].tolist())
    assert len(counts) < 40
    d2t, t2d = preprocessing.process_token_dict_to_mappings(counts, 40, VOCAB)
    assert torch.equal(found["d2t"], d2t)
    assert torch.equal(found["t2d"], t2d)


# --- speculators


def test_speculators_reads_every_row_with_its_states(dump: Path, expected: list[Expected], tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data")
    dest = exported(dump, tmp_path / "d", "speculators")
    found = data.ArrowDataset(2048, str(dest), on_missing="raise")
    assert len(found) == 5
    assert list(found.approx_lengths) == [sample.S for sample in expected]
    for item, sample in zip((found[i] for i in range(5)), expected, strict=True):
        assert torch.equal(item["input_ids"], sample.input_ids)
        assert torch.equal(item["loss_mask"], sample.loss_mask)
        assert torch.equal(item["hidden_states"], sample.side_by_side(*BOUNDARIES))
        assert torch.equal(item["verifier_last_hidden_states"], sample.pre)


def test_speculators_packs_rows_into_a_batch(dump: Path, expected: list[Expected], tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data")
    from speculators.models.eagle3.data import shift_batch

    found = data.ArrowDataset(2048, str(exported(dump, tmp_path / "d", "speculators")), on_missing="raise")
    batch = data.CollateFn(64, H, 3, preprocess=shift_batch)([found[0], found[1]])
    first, second = expected[0], expected[1]
    due = torch.cat([first.side_by_side(*BOUNDARIES)[:-1], second.side_by_side(*BOUNDARIES)[:-1]])
    assert torch.equal(batch["hidden_states"][0, : len(due)], due)
    assert batch["document_ids"][0].tolist() == [0] * 6 + [1] * 11 + [-1] * 47


def test_speculators_validation_split_finds_the_files_of_its_rows(
    dump: Path, expected: list[Expected], tmp_path: Path
) -> None:
    data = pytest.importorskip("speculators.train.data")
    dest = exported(dump, tmp_path / "d", "speculators")
    found = data.ArrowDataset(2048, str(dest), on_missing="raise", train_ratio=0.6, split="val")
    assert torch.equal(found[1]["verifier_last_hidden_states"], expected[4].pre)


def test_speculators_checks_pass_and_a_wrong_token_is_dropped(
    dump: Path, expected: list[Expected], tmp_path: Path
) -> None:
    data = pytest.importorskip("speculators.train.data")
    from safetensors.torch import load_file, save_file
    from speculators.data_generation.offline import check_hidden_states

    dest = exported(dump, tmp_path / "d", "speculators")
    for i, sample in enumerate(expected):
        check_hidden_states(load_file(dest / f"hidden_states/hs_{i}.safetensors"), sample.input_ids.tolist())
    path = dest / "hidden_states/hs_1.safetensors"
    tensors = load_file(path)
    tensors["token_ids"][3] += 1
    save_file(tensors, path)
    assert not isinstance(data.ArrowDataset(2048, str(dest), on_missing="raise")[1], dict)


def test_speculators_makes_the_same_mapping_from_our_frequencies(dump: Path, tmp_path: Path) -> None:
    mapping = pytest.importorskip("speculators.train.vocab_mapping")
    import numpy as np

    dest = exported(dump, tmp_path / "d", "speculators", draft_vocab_size=20)
    d2t, t2d = mapping.build_vocab_mappings_from_distribution(
        torch.load(dest / "token_freq.pt", weights_only=True), 20, VOCAB
    )
    assert np.array_equal(np.load(dest / "d2t.npy"), d2t.numpy())
    assert np.array_equal(np.load(dest / "t2d.npy"), t2d.numpy())


# --- Model-Optimizer


@pytest.mark.parametrize("norm", [None, "pre"])
def test_modelopt_collates_the_files(dump: Path, expected: list[Expected], tmp_path: Path, norm: str | None) -> None:
    utils = pytest.importorskip("modelopt.torch.speculative.eagle.utils")
    dest = exported(dump, tmp_path / "d", "modelopt", norm=norm)
    found = utils.OfflineSupervisedDataset(sorted(map(str, dest.glob("*.pt"))), answer_only_loss=True)
    batch = utils.EagleOfflineDataCollator(30)([found[i] for i in range(5)])
    outputs = batch["base_model_outputs"]
    assert outputs["base_hidden_prenorm"] is (norm == "pre")
    for row, sample in enumerate(expected):
        S = sample.S
        assert torch.equal(batch["input_ids"][row, :S], sample.input_ids)
        assert torch.equal(batch["loss_mask"][row, :S], sample.loss_mask)
        assert torch.equal(outputs["aux_hidden_states"][row, :S], sample.side_by_side(*BOUNDARIES))
        last = sample.pre if norm == "pre" else sample.post
        assert torch.equal(outputs["base_model_hidden_states"][row, :S], last)


def test_modelopt_refuses_a_mixture_of_norm_states(dump: Path, tmp_path: Path) -> None:
    utils = pytest.importorskip("modelopt.torch.speculative.eagle.utils")
    files = [
        str(exported(dump, tmp_path / name, "modelopt", norm=norm) / "00000000.pt")
        for name, norm in (("a", "pre"), ("b", None))
    ]
    found = utils.OfflineSupervisedDataset(files, answer_only_loss=True)
    with pytest.raises(ValueError, match="not constant across the batch"):
        utils.EagleOfflineDataCollator(30)([found[0], found[1]])


# --- Automodel


def test_automodel_reads_the_dspark_cache(dump: Path, expected: list[Expected], target: Path, tmp_path: Path) -> None:
    cache = pytest.importorskip("nemo_automodel.components.datasets.llm.dspark_cache")
    dest = exported(dump, tmp_path / "d", "automodel-dspark", shard_size=2)
    (batch,) = list(cache.build_cached_dspark_dataloader(cache_dir=str(dest), batch_size=5, shuffle=False))
    for row, sample in enumerate(expected):
        assert torch.equal(batch["input_ids"][row, : sample.S], sample.input_ids)
        assert torch.equal(batch["target_hidden_states"][row, : sample.S], sample.side_by_side(*BOUNDARIES))
        assert torch.equal(batch["target_last_hidden_states"][row, : sample.S], sample.post)
    embeddings, lm_head = cache.read_target_weight_modules(str(dest))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert torch.equal(embeddings.weight, model.model.embed_tokens.weight)
    assert torch.equal(lm_head.weight, model.lm_head.weight)


def test_automodel_agrees_with_the_dspark_manifest(dump: Path, target: Path, tmp_path: Path) -> None:
    cache = pytest.importorskip("nemo_automodel.components.datasets.llm.dspark_cache")
    from transformers import AutoConfig

    dest = exported(dump, tmp_path / "d", "automodel-dspark", target_model="org/target", seq_length=32)
    found = cache.read_manifest(str(dest))
    due = cache.build_cache_manifest(
        target_model="org/target", target_model_type="llama", target_text_config=AutoConfig.from_pretrained(target),
        seq_length=32, dtype="bf16", num_samples=5, shard_size=64, target_layer_ids=[1, 3, 4],
        train_data_path=found["train_data_path"], train_split=None, shuffle_seed=0, mask_reasoning_content=False,
        chat_template_sha256=_template_sha256(target),
    )  # fmt: skip
    assert cache.manifest_mismatch_fields(found, due) == []


def _template_sha256(target: Path) -> str:
    from nemo_automodel.components.datasets.llm.dspark_cache import tokenizer_chat_template_sha256
    from transformers import AutoTokenizer

    return tokenizer_chat_template_sha256(AutoTokenizer.from_pretrained(target))


def test_automodel_refuses_a_dspark_cache_marked_incomplete(dump: Path, tmp_path: Path) -> None:
    cache = pytest.importorskip("nemo_automodel.components.datasets.llm.dspark_cache")
    path = exported(dump, tmp_path / "d", "automodel-dspark") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"complete": False}))
    with pytest.raises(ValueError, match="incomplete"):
        cache.CachedDSparkDataset(str(path.parent))


def test_automodel_reads_the_eagle3_cache_and_makes_the_same_distribution(
    dump32: Path, expected32: list[Expected], tmp_path: Path
) -> None:
    cache = pytest.importorskip("nemo_automodel.components.datasets.llm.eagle3_cache")
    from nemo_automodel.components.speculative.eagle.core import _compute_target_distribution, _shift_left_with_zero

    dest = exported(dump32, tmp_path / "d", "automodel-eagle3", draft_vocab_size=100, shard_size=2)
    token_ids = torch.tensor(cache.read_manifest(str(dest))["selected_token_ids"])
    sayable = torch.zeros(VOCAB, dtype=torch.bool)
    sayable[token_ids] = True
    (batch,) = list(cache.build_cached_eagle3_dataloader(cache_dir=str(dest), batch_size=5, shuffle=False))
    for row, sample in enumerate(expected32):
        S = sample.S
        loss_mask = _shift_left_with_zero(sample.loss_mask[None])
        probabilities, position_mask = _compute_target_distribution(
            _shift_left_with_zero(sample.logits[None]), token_ids, sayable, loss_mask
        )
        assert torch.equal(batch["input_ids"][row, :S], _shift_left_with_zero(sample.input_ids[None])[0])
        assert torch.equal(batch["loss_mask"][row, :S], loss_mask[0])
        assert torch.equal(batch["position_mask"][row, :S], position_mask[0])
        found = batch["target_probs"][row, : S - 1]
        torch.testing.assert_close(found, probabilities[0, :-1], atol=1e-6, rtol=1e-5)
    assert cache.read_target_embeddings(str(dest)).shape == (VOCAB, H)


def test_automodel_makes_the_same_of_the_most_likely_tokens(dump32: Path, tmp_path: Path) -> None:
    cache = pytest.importorskip("nemo_automodel.components.datasets.llm.eagle3_cache")
    whole = cache.CachedEagle3Dataset(str(exported(dump32, tmp_path / "w", "automodel-eagle3", draft_vocab_size=100)))
    topk = cache.CachedEagle3Dataset(
        str(exported(dump32, tmp_path / "k", "automodel-eagle3", draft_vocab_size=100, target_probs_topk=5))
    )
    real = whole[3]["attention_mask"].sum() - 1
    values, places = cache.compress_target_probs(whole[3]["target_probs"][:real], 5)
    due = cache.reconstruct_target_probs(values, places, 100)
    torch.testing.assert_close(topk[3]["target_probs"][:real], due, atol=1e-6, rtol=1e-5)
