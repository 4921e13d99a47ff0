"""What an export refuses, with the reason, and that nothing is written then."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hiddentap.capture.formats import ExportSettings, FormatError, LayoutError, export_dataset
from hiddentap.models.errors import RunError, UsageError
from support import tiny
from support.damage import change_record
from support.model_folder import VOCAB, model_folder
from support.trainer_dump import capture


def refusal(dump: Path, dest: Path, to: str, kind: type[Exception] = FormatError, **options: object) -> str:
    with pytest.raises(kind) as refused:
        export_dataset(ExportSettings(dump, to, dest, **options))
    assert not dest.exists()
    return str(refused.value)


@pytest.fixture(scope="module")
def post_only(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(target, data, tmp_path_factory.mktemp("post") / "out", (1, 3, 4), final="post")


@pytest.fixture(scope="module")
def headless(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(target, data, tmp_path_factory.mktemp("headless") / "out", (1, 3, 4), head=False)


def test_speculators_cannot_be_made_of_post_norm(post_only: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    assert refusal(post_only, tmp_path / "d", "speculators") == (
        "speculators applies the final norm itself and wants what enters it; this capture holds post-norm only, and a norm "
        "cannot be undone. Capture again with --final pre."
    )


def test_modelopt_cannot_be_given_pre_norm_that_is_not_there(post_only: Path, tmp_path: Path) -> None:
    assert "holds post-norm only" in refusal(post_only, tmp_path / "d", "modelopt", norm="pre")


POST_NORM = [
    ("specforge", {"algorithm": "eagle3"}),
    ("specforge", {"algorithm": "dspark"}),
    ("deepspec", {}),
    ("modelopt", {}),
    ("automodel-dspark", {}),
    ("automodel-eagle3", {}),
    ("angelslim", {"algorithm": "eagle3"}),
    ("eagle1", {}),
]


@pytest.mark.parametrize(("to", "options"), POST_NORM, ids=[to + str(o) for to, o in POST_NORM])
def test_post_norm_of_pre_norm_needs_the_head(headless: Path, tmp_path: Path, to: str, options: dict) -> None:
    text = refusal(headless, tmp_path / "d", to, **options)
    assert "making post-norm for" in text
    assert f"{headless / 'head'} holds none. Capture again with --head, or give a head folder" in text


@pytest.mark.parametrize(("to", "options"), POST_NORM, ids=[to + str(o) for to, o in POST_NORM])
def test_a_capture_without_norm_states_has_no_last_states(captured, tmp_path: Path, to: str, options: dict) -> None:
    dump = captured("out", (1, 3, 4), final="none")
    assert "this capture holds neither norm state" in refusal(dump, tmp_path / "d", to, **options)


def test_a_head_from_elsewhere_serves(headless: Path, dump: Path, tmp_path: Path) -> None:
    export_dataset(ExportSettings(headless, "deepspec", tmp_path / "d", head=dump / "head"))
    assert (tmp_path / "d/manifest.json").is_file()


def test_the_head_of_another_model_is_refused(headless: Path, data: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "m", tiny.build_llama(vocab_size=VOCAB, pad_token_id=None, hidden_size=16))
    head = capture(other, data, tmp_path / "other", (1,)) / "head"
    text = refusal(headless, tmp_path / "d", "deepspec", head=head)
    assert text == f"{head} is the head of another model: hidden_size is 16 there and 32 in the capture."


@pytest.mark.parametrize(
    ("to", "options"),
    [("specforge", {"algorithm": "eagle3"}), ("angelslim", {"algorithm": "eagle3"}), ("automodel-eagle3", {})],
)
def test_eagle3_wants_exactly_three_layers(captured, tmp_path: Path, to: str, options: dict) -> None:
    dump = captured("out", (1, 3))
    assert "wants exactly three layers; this capture holds 2 (boundaries 2, 4)." in refusal(
        dump, tmp_path / "d", to, **options
    )


LAST = [
    ("specforge", {"algorithm": "dflash"}, "never captures the layer"),
    ("deepspec", {}, "its cache and its evaluation disagree on the norm"),
    ("modelopt", {}, "its dumps hold that layer after the final norm, its online training before it"),
    ("angelslim", {"algorithm": "dflash"}, "before the final norm, the other after it"),
]


@pytest.mark.parametrize(("to", "options", "why"), LAST, ids=[to for to, *_ in LAST])
def test_the_last_layer_is_refused_where_its_meaning_differs(
    captured, tmp_path, to: str, options: dict, why: str
) -> None:
    dump = captured("out", (1, 3, 7))
    text = refusal(dump, tmp_path / "d", to, **options)
    assert "cannot take layer id 7, the last of 8 layers" in text
    assert why in text


def test_the_last_layer_is_before_the_norm_for_speculators_and_automodel_eagle3(captured, expected, tmp_path) -> None:
    from safetensors.torch import load_file

    dump = captured("out", (1, 3, 7))
    export_dataset(ExportSettings(dump, "automodel-eagle3", tmp_path / "a"))
    found = load_file(tmp_path / "a/shard-000000.safetensors")["aux_hidden_states"]
    assert torch.equal(found[0, : expected[0].S, 64:], expected[0].pre)
    pytest.importorskip("datasets")
    export_dataset(ExportSettings(dump, "speculators", tmp_path / "s"))
    states = load_file(tmp_path / "s/hidden_states/hs_0.safetensors")["hidden_states"]
    assert torch.equal(states[:, 2], states[:, 3])


EMBEDDINGS = [
    ("specforge", {"algorithm": "dflash"}),
    ("modelopt", {}),
    ("angelslim", {"algorithm": "dflash"}),
    ("automodel-eagle3", {}),
]


@pytest.mark.parametrize(("to", "options"), EMBEDDINGS, ids=[to for to, _ in EMBEDDINGS])
def test_embeddings_are_refused_where_no_id_names_them(captured, tmp_path: Path, to: str, options: dict) -> None:
    dump = captured("out", (0, 2, 3), convention="boundary")
    assert "has no layer id for the embeddings" in refusal(dump, tmp_path / "d", to, **options)


def test_a_mapping_needs_the_size_of_the_vocabulary(post_only: Path, tmp_path: Path) -> None:
    dump = tmp_path / "out"
    shutil.copytree(post_only, dump)
    shutil.rmtree(dump / "head")
    for to in ("specforge", "angelslim"):
        text = refusal(dump, tmp_path / "d", to, algorithm="eagle3")
        assert (
            "vocabulary mapping needs the size of the target's vocabulary: give --target-vocab-size, or a head" in text
        )


def test_a_vocabulary_that_is_too_small_for_the_tokens_is_refused(dump: Path, tmp_path: Path) -> None:
    text = refusal(dump, tmp_path / "d", "specforge", LayoutError, algorithm="eagle3", target_vocab_size=50)
    assert text.endswith("is supervised and the vocabulary has 50 tokens; is it another model's?")


def test_a_draft_vocabulary_larger_than_the_target_is_refused(dump: Path, tmp_path: Path) -> None:
    text = refusal(dump, tmp_path / "d", "automodel-eagle3", draft_vocab_size=300)
    assert text == "a draft vocabulary of 300 tokens is larger than the target's 259."


def test_more_likely_tokens_than_there_are_is_refused(dump: Path, tmp_path: Path) -> None:
    text = refusal(dump, tmp_path / "d", "automodel-eagle3", draft_vocab_size=20, target_probs_topk=20)
    assert "keeps fewer than its 20 draft tokens or all of them" in text


def test_logits_that_the_model_changes_after_lm_head_are_refused(dump: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(dump / "head", head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    change_record(head / "head.json", lambda record: record.pop("config_crc32"))
    text = refusal(dump, tmp_path / "d", "automodel-eagle3", head=head)
    assert "needs logits, and this model changes them after lm_head ({'final_logit_softcapping': 30.0})" in text


PER_ALGORITHM = "has a layout per algorithm; give --algorithm eagle3 or dflash"
ALL = "specforge, speculators, deepspec, modelopt, automodel-dspark, automodel-eagle3, angelslim, eagle1"
OPTIONS = [
    ("specforge", {}, f"specforge {PER_ALGORITHM} or domino or dspark (none was given)."),
    ("angelslim", {"algorithm": "dspark"}, f"angelslim {PER_ALGORITHM} (got 'dspark')."),
    ("deepspec", {"algorithm": "dspark"}, "deepspec has one layout for all algorithms; leave --algorithm dspark out."),
    ("deepspec", {"seq_length": 9}, "--seq-length means nothing to deepspec; leave it out."),
    ("eagle1", {"compress": True, "norm": "pre"}, "--compress, --norm means nothing to eagle1; leave it out."),
    ("nobody", {}, f"unknown layout 'nobody'; expected one of {ALL}."),
]


@pytest.mark.parametrize(("to", "options", "text"), OPTIONS)
def test_options_that_mean_nothing_are_refused(dump: Path, tmp_path: Path, to: str, options: dict, text: str) -> None:
    assert refusal(dump, tmp_path / "d", to, **options) == text


@pytest.mark.parametrize("options", [{"seq_length": 0}, {"shard_size": 0}, {"min_supervised": -1}, {"norm": "both"}])
def test_values_that_cannot_be_are_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(UsageError):
        ExportSettings(tmp_path, "deepspec", tmp_path / "d", **options)


def test_no_sample_left_is_an_error_with_the_reasons(dump: Path, tmp_path: Path) -> None:
    text = refusal(dump, tmp_path / "d", "deepspec", RunError, min_supervised=99)
    assert text == "none of the 5 samples can be exported: 5 have fewer than 99 supervised tokens."


def test_a_capture_that_is_not_complete_is_refused(dump: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out"
    shutil.copytree(dump, partial)
    change_record(partial / "manifest.json", lambda manifest: manifest.update(complete=False))
    assert "the capture is not complete" in refusal(partial, tmp_path / "d", "deepspec", RunError)


def test_a_folder_that_is_no_capture_is_refused(tmp_path: Path) -> None:
    assert "holds no captured shards" in refusal(tmp_path, tmp_path / "d", "deepspec", UsageError)
    (tmp_path / "shards").mkdir()
    assert "is no manifest of this format" in refusal(tmp_path, tmp_path / "d", "deepspec", RunError)


def test_rows_that_are_not_finite_in_the_layouts_dtype_are_refused(captured, tmp_path: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    loud = tmp_path / "loud"
    shutil.copytree(target, loud)
    weights = load_file(loud / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1e6
    save_file(weights, loud / "model.safetensors", metadata={"format": "pt"})
    from support.trainer_dump import capture as capture_of
    from support.trainer_dump import write_data

    dump = capture_of(loud, write_data(tmp_path / "rows.jsonl"), tmp_path / "out", (1,), final="post")
    with pytest.raises(
        LayoutError, match=r"sample '../../etc/passwd', the last hidden states: 7 row\(s\), the first at token 0"
    ):
        export_dataset(ExportSettings(dump, "eagle1", tmp_path / "d"))


def test_a_link_to_nothing_is_no_destination(headless: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert f"{tmp_path}/link is a link to {tmp_path}/gone, which does not exist; make that folder" in refusal(
        headless, tmp_path / "link", "automodel-eagle3", UsageError
    )
