"""Final norm, lm_head and embeddings in a folder of their own."""

import json
from pathlib import Path

import pytest
import torch

from hiddentap.models.head import HeadError, load_head, load_head_config, save_head
from support import tiny

NORMS = {"llama": "model.norm", "gemma2": "model.norm", "gpt2": "transformer.ln_f", "kimi_linear": "model.norm"}


@pytest.mark.parametrize("family", NORMS)
def test_the_parts_compute_the_same_bits_when_read_back(family: str, tmp_path: Path) -> None:
    model = tiny.build(family)
    save_head(tmp_path, model, NORMS[family])
    head = load_head(tmp_path)
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.norm(rows), model.get_submodule(NORMS[family])(rows))
    assert torch.equal(head.lm_head(rows), model.get_output_embeddings()(rows))
    ids = tiny.token_ids(1, 5)
    assert torch.equal(head.embeddings(ids), model.get_input_embeddings()(ids))


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    save_head(tmp_path / "tied", tiny.build_llama(tie_word_embeddings=True), "model.norm")
    save_head(tmp_path / "own", tiny.build_llama(), "model.norm")
    sizes = [(tmp_path / name / "head.safetensors").stat().st_size for name in ("tied", "own")]
    assert sizes[1] - sizes[0] >= 96 * 32 * 4
    head = load_head(tmp_path / "tied")
    assert torch.equal(head.lm_head.weight, head.embeddings.weight)


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    save_head(tmp_path, tiny.build("llama", dtype=torch.bfloat16), "model.norm")
    assert load_head(tmp_path).lm_head.weight.dtype == torch.bfloat16


def test_a_norm_that_computes_otherwise_when_built_again_is_refused_again_and_again(tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.model.norm.variance_epsilon = 0.5
    for _ in range(2):
        with pytest.raises(HeadError, match="gives other values when it is built again"):
            save_head(tmp_path, model, "model.norm")
    with pytest.raises(HeadError, match="holds no head"):
        load_head(tmp_path)


def test_a_folder_without_a_head_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match=r"holds no head .*capture with --head"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [("paths", {"norm": "model.ngrm"}), ("paths", {"norm": 3}), ("tied", {"lm_head.weight": "nothing"}), ("tied", 7)],
)
def test_a_description_without_a_checksum_that_fits_no_model_is_damaged(
    part: str, value: object, tmp_path: Path
) -> None:
    save_head(tmp_path, tiny.build("llama"), "model.norm")
    described = json.loads((tmp_path / "head.json").read_text())
    earlier = {"paths": described["paths"], "tied": described["tied"]}
    (tmp_path / "head.json").write_text(json.dumps(earlier | {part: value}))
    with pytest.raises(HeadError, match=r"head\.json is damaged"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    "config", [b"", b"{", b"[1]", b"\xc2{}", b'{"model_type": 7}', b'{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_config_without_a_checksum_that_is_none_is_a_damaged_head(config: bytes, tmp_path: Path) -> None:
    save_head(tmp_path, tiny.build_llama(), "model.norm")
    record = json.loads((tmp_path / "head.json").read_text())
    (tmp_path / "head.json").write_text(json.dumps({key: record[key] for key in ("paths", "tied")}))
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(HeadError):
        load_head(tmp_path)
    if b"model_type" not in config:
        with pytest.raises(HeadError, match=r"config\.json is damaged"):
            load_head_config(tmp_path)
