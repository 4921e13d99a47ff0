"""What `verify` says of folders that were damaged on purpose, each in one way."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hiddentap import CapturedDataset
from hiddentap.capture.verify import Report, verify
from support import tiny
from support.captured import captured, plain_states
from support.damage import Columns, flip_bit, rewrite
from support.model_folder import VOCAB, llama_folder, model_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def llama(place: Path) -> Path:
    return llama_folder(place / "llama")


@pytest.fixture(scope="module")
def stranger(place: Path) -> Path:
    return llama_folder(place / "stranger", seed=1)


@pytest.fixture(scope="module")
def halved(place: Path) -> Path:
    return model_folder(place / "halved", tiny.build_llama(vocab_size=VOCAB, pad_token_id=None).bfloat16())


@pytest.fixture(scope="module")
def folders(place: Path, llama: Path, halved: Path) -> dict[str, Path]:
    return {
        "exact": captured(llama, place / "exact", exact=True),
        "batched": captured(llama, place / "batched", batch_tokens=512),
        "half": captured(halved, place / "half", batch_tokens=512),
        "half exact": captured(halved, place / "half-exact", exact=True),
    }


@pytest.fixture
def copy(folders: Mapping[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / "out"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def errors(report: Report) -> set[tuple[str | None, str]]:
    return {(finding.tensor, finding.what.split(":")[0]) for finding in report.findings if finding.severity == "error"}


@pytest.mark.parametrize("name", ["exact", "batched", "half", "half exact"])
def test_nothing_is_found_in_a_good_folder(name: str, folders: Mapping[str, Path]) -> None:
    report = verify(folders[name])
    assert report.ok, str(report)
    assert (report.compared, report.samples, report.shards) == (6, 6, 2)
    assert [a.tap for a in report.agreement] == ["layer 0", "layer 1", "layer 3", "pre-norm", "post-norm"]
    if "exact" in name:
        assert all(a.bit_equal == a.rows == report.rows for a in report.agreement)


def mamba() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=8)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "kimi_linear", "mamba"])
def test_nothing_is_found_whatever_the_family(family: str, tmp_path: Path) -> None:
    model = mamba() if family == "mamba" else tiny.build(family, vocab_size=VOCAB, pad_token_id=None)
    report = verify(captured(model_folder(tmp_path / "model", model), tmp_path / "out", exact=True))
    assert report.ok, str(report)
    assert report.reference is not None
    # Entry k of a Mamba's hidden_states is boundary k + 1: what enters its layers is used, and the report says so.
    said = "what enters the layers at backbone.layers (hidden_states of MambaForCausalLM are not these)"
    assert (said in report.reference) is (family == "mamba")


@pytest.mark.parametrize("name", ["exact", "batched", "half"])
def test_layer_ids_off_by_one_are_named(name: str, copy, llama: Path, halved: Path) -> None:
    out = copy(name)
    model = loaded(halved, torch.bfloat16) if name == "half" else loaded(llama)

    def off_by_one(columns: Columns) -> None:
        right = plain_states(model, columns["input_ids"])
        columns["aux_hidden_states"] = torch.stack([right[k] for k in (0, 1, 3)], 1)

    rewrite(out, off_by_one)
    said = errors(verify(out))
    for layer, found in ((0, 0), (1, 1), (3, 3)):
        what = f"stored layer {layer} matches boundary {found}, not {layer + 1} as declared in 3 compared samples"
        assert ("aux_hidden_states", what) in said
    assert len(said) == 3  # of each of the two shards


def only(out: Path) -> str:
    """What is said of shard 0, where one fault is said of it."""
    report = verify(out)
    found = {finding.what for finding in report.findings if finding.severity == "error"}
    assert len(found) == 1, str(report)
    return found.pop()


def test_a_header_that_declares_other_layers_is_told_from_the_values(copy) -> None:
    out = copy("exact")

    def declare(metadata: dict) -> None:
        metadata["taps"] |= {"boundaries": [1, 3, 4], "layer_ids": [0, 2, 3]}

    rewrite(out, metadata=declare)
    said = {finding.what for finding in verify(out).findings if finding.severity == "error"}
    assert "stored layer 2 matches boundary 2, not 3 as declared in 3 compared samples" in said
    assert any("of another run than the folder: taps.boundaries: [1, 2, 4] -> [1, 3, 4]" in what for what in said)


@pytest.mark.parametrize(("shift", "token"), [(1, "t+1"), (-1, "t-1")])
@pytest.mark.parametrize("name", ["batched", "half"])
def test_shifted_rows_are_named(name: str, shift: int, token: str, copy) -> None:
    out = copy(name)

    def shifted(columns: Columns) -> None:
        rows = columns["pre_norm"]
        columns["pre_norm"] = torch.cat([rows[1:], rows[:1]] if shift == 1 else [rows[-1:], rows[:-1]])

    rewrite(out, shifted, index=0)
    said = f"rows shifted by one: row t of pre-norm holds the state of token {token} in 3 compared samples"
    assert said in {finding.what for finding in verify(out).findings}


def test_shifted_rows_of_another_layer_are_named_as_both(copy, llama: Path) -> None:
    out, model = copy("exact"), loaded(llama)

    def damage(columns: Columns) -> None:
        right = plain_states(model, columns["input_ids"])[1]
        columns["aux_hidden_states"][:, 1] = torch.cat([right[1:], right[:1]])

    rewrite(out, damage, sample="s0")
    assert only(out) == (
        "stored layer 1 matches boundary 1, not 2 as declared, and rows shifted by one: row t of layer 1 holds the state "
        "of token t+1"
    )


@pytest.mark.parametrize("name", ["exact", "batched", "half"])
def test_a_norm_state_taken_for_the_other_is_named(name: str, copy) -> None:
    out = copy(name)

    def swap(columns: Columns) -> None:
        columns["pre_norm"], columns["post_norm"] = columns["post_norm"], columns["pre_norm"]

    rewrite(out, swap, index=0)
    found = {finding.tensor: finding.what for finding in verify(out).findings if " stored as " in finding.what}
    assert found == {
        "pre_norm": "post-norm stored as pre-norm in 3 compared samples",
        "post_norm": "pre-norm stored as post-norm in 3 compared samples",
    }


def test_the_last_layer_stored_normed_is_named(copy) -> None:
    out = copy("exact")

    def norm_last(columns: Columns) -> None:
        columns["aux_hidden_states"][:, 2] = columns["post_norm"]

    rewrite(out, norm_last, sample="s3")
    assert only(out) == "stored layer 3 matches post-norm, not boundary 4 as declared"


def test_swapped_layers_are_named_one_by_one(copy) -> None:
    out = copy("batched")

    def swap(columns: Columns) -> None:
        columns["aux_hidden_states"] = columns["aux_hidden_states"][:, [1, 0, 2]].contiguous()

    rewrite(out, swap, sample="s2")
    assert errors(verify(out)) == {
        ("aux_hidden_states", "stored layer 0 matches boundary 2, not 1 as declared"),
        ("aux_hidden_states", "stored layer 1 matches boundary 1, not 2 as declared"),
    }


@pytest.mark.parametrize("name", ["exact", "batched", "half"])
def test_another_models_rows_are_told_as_such_and_as_no_layer(name: str, copy, stranger: Path) -> None:
    out, model = copy(name), loaded(stranger)

    def replace(columns: Columns) -> None:
        right, dtype = plain_states(model, columns["input_ids"]), columns["pre_norm"].dtype
        columns["aux_hidden_states"] = torch.stack([right[k] for k in (1, 2, 4)], 1).to(dtype)
        columns["pre_norm"], columns["post_norm"] = right[4].to(dtype), right[5].to(dtype)

    rewrite(out, replace, index=0)
    report = verify(out)
    found = [finding for finding in report.findings if finding.severity == "error"]
    assert {finding.tensor for finding in found} == {"aux_hidden_states", "pre_norm", "post_norm"}
    about_weights = [finding for finding in found if not finding.what.startswith("final norm and lm_head")]
    assert all(finding.what.startswith("different weights or data in 3 compared samples") for finding in about_weights)


def test_a_model_that_is_not_the_captured_one_is_told_by_files_and_values(folders, stranger: Path) -> None:
    report = verify(folders["exact"], model=stranger)
    assert next(f.what for f in report.findings if f.severity == "warning").startswith(
        f"the weight files of {stranger} are not those of the captured model"
    )
    assert any(f.what.startswith("different weights or data") for f in report.findings)


def test_a_flipped_bit_is_found_by_checksum_and_by_value(copy) -> None:
    out = copy("exact")
    flip_bit(
        out / "shards/shard-000000.safetensors", "pre_norm", byte=5 * 32 * 4 + 2
    )  # row 5, a bit of value 0's mantissa
    found = list(verify(out).findings)
    assert [finding.tensor for finding in found] == ["pre_norm", "pre_norm"]
    assert "its bytes changed on disk" in found[0].what
    assert found[1].what.startswith("rows of pre-norm are not boundary 4 of the model: 1 of its ")
    assert "first at token 5" in found[1].what
    assert found[0].sample_id == found[1].sample_id


@pytest.mark.parametrize("name", ["exact", "batched", "half"])
def test_one_row_of_one_sample_that_is_wrong_is_found_whatever_its_checksum(name: str, copy) -> None:
    out = copy(name)

    def damage(columns: Columns) -> None:
        columns["aux_hidden_states"][7, 1] = columns["aux_hidden_states"][7, 1].flip(0)

    rewrite(out, damage, sample="s4")
    report = verify(out)
    (found,) = report.findings
    assert (found.sample_id, found.severity) == ("s4", "error")
    assert found.what.startswith("rows of layer 1 are not boundary 2 of the model: 1 of its ")
    assert "rows, first at token 7" in found.what


def test_a_truncated_shard_is_found_and_the_others_are_still_compared(copy) -> None:
    out = copy("exact")
    os.truncate(out / "shards/shard-000001.safetensors", 2000)
    report = verify(out)
    assert any("truncated" in finding.what or "cut" in finding.what for finding in report.findings)
    assert report.compared == 3


def test_changed_tokens_are_found_by_the_plan_and_by_the_values(copy) -> None:
    out = copy("exact")

    def change(columns: Columns) -> None:
        columns["input_ids"][2] += 1

    rewrite(out, change, sample="s1")
    found = {finding.tensor: finding for finding in verify(out).findings}
    assert found["input_ids"].what == "differs from the plan in 1 of its tokens, first at token 2"
    assert {finding.sample_id for finding in found.values()} == {"s1"}
    assert found["aux_hidden_states"].what.startswith("different weights or data")


def test_a_row_that_is_no_number_is_found_by_itself_and_beside_the_model(copy) -> None:
    out = copy("half")

    def poison(columns: Columns) -> None:
        columns["aux_hidden_states"][3, 0, 1] = torch.nan

    rewrite(out, poison, sample="s5")
    found = [finding.what for finding in verify(out).findings]
    assert found[0] == "non-finite values in 1 of its tokens, first at token 3 at slot 0"
    assert found[1].startswith("rows of layer 0 are not boundary 1 of the model: 1 of its ")
    assert len(found) == 2


def in_float32(halved: Path, noise: float = 0.0) -> Callable[[Columns], None]:
    """Rows as a float32 forward of the half-precision weights gives them, rounded when stored, with noise of that share."""
    model = loaded(halved).float()
    generator = torch.Generator().manual_seed(0)

    def change(columns: Columns) -> None:
        right = plain_states(model, columns["input_ids"])
        rows = [
            state + noise * state.norm(dim=-1, keepdim=True) / 32**0.5 * torch.randn(state.shape, generator=generator)
            for state in right
        ]
        columns["aux_hidden_states"] = torch.stack([rows[k] for k in (1, 2, 4)], 1).bfloat16()
        columns["pre_norm"], columns["post_norm"] = rows[4].bfloat16(), rows[5].bfloat16()

    return change


def test_other_roundings_of_half_precision_are_no_fault_in_a_batched_run(copy, halved: Path) -> None:
    out = copy("half")
    rewrite(out, in_float32(halved))
    report = verify(out)
    assert report.ok, str(report)
    assert all(a.bit_equal < a.rows and a.median > 0 for a in report.agreement)


def test_other_roundings_are_told_in_an_exact_run_as_a_warning(copy, halved: Path) -> None:
    out = copy("half exact")
    rewrite(out, in_float32(halved))
    found = verify(out).findings
    assert {finding.severity for finding in found} == {"warning"}
    assert all(finding.what.startswith("an exact run, but not bit-equal here") for finding in found)


def test_rows_farther_from_float32_than_rounding_takes_them_are_a_fault(copy, halved: Path) -> None:
    out = copy("half")
    rewrite(out, in_float32(halved, noise=0.05))
    found = verify(out).findings
    assert {finding.tensor for finding in found} == {"aux_hidden_states", "pre_norm", "post_norm"}
    assert all(finding.what.startswith("different weights or data") for finding in found)
    assert all("of its row errors against float32 is" in finding.what for finding in found)


def test_a_header_without_taps_or_with_too_few_is_told_and_not_compared(copy) -> None:
    out = copy("exact")
    rewrite(out, index=0, metadata=lambda metadata: metadata.pop("taps"))
    rewrite(out, index=1, metadata=lambda metadata: metadata["taps"].update(boundaries=[1]))
    report = verify(out)
    said = [finding.what for finding in report.findings if finding.what.startswith("not compared")]
    assert said[0].endswith("its header does not say which states it holds: 'taps' is missing")
    assert said[1].endswith("its header declares boundaries [1] of 4 layers and it holds 3 states a row")
    assert report.compared == 0


def test_a_model_of_another_depth_is_told_and_not_compared(folders, tmp_path: Path) -> None:
    deeper = llama_folder(tmp_path / "deeper", num_hidden_layers=6)
    said = [finding.what for finding in verify(folders["exact"], model=deeper).findings]
    assert (
        said[-1] == "not compared with the model: it has 6 decoder layers and the headers say 4: it is another model."
    )


@pytest.mark.parametrize("wrong", [VOCAB, -1, 2**31 - 1], ids=["next", "negative", "largest"])
@pytest.mark.parametrize("model", [None, "none"], ids=["beside the model", "beside the head"])
def test_an_id_that_the_model_has_not_is_a_finding_and_the_other_samples_are_compared(
    wrong: int, model: str | None, llama: Path, tmp_path: Path
) -> None:
    out = captured(llama, tmp_path / "out", exact=True, head=True)
    sample = CapturedDataset(out)[0]["sample_id"]

    def change(columns: Columns) -> None:
        columns["input_ids"][5] = wrong

    rewrite(out, change, sample=sample)
    report = verify(out, model=model)
    told = [finding.what for finding in report.findings if finding.sample_id == sample and finding.witness == "model"]
    assert told == [f"id {wrong} at token 5 is none of the model's, which are 0..{VOCAB - 1}; not compared"]
    assert report.compared == (5 if model is None else 0)
