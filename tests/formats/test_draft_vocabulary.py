"""Exports that keep the draft vocabulary of an existing draft model, from every file that holds one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiddentap.capture.formats import ExportSettings, LayoutError, export_dataset
from hiddentap.capture.formats.vocabulary_file import read_vocabulary
from hiddentap.models.errors import UsageError
from support.model_folder import VOCAB
from support.trainer_dump import Expected

# Draft id i is target token TOKENS[i]; neither ascending nor the most frequent ones.
TOKENS = [40, 3, 41, 7, 200, 258, 0]
D2T = torch.tensor([40, 2, 39, 4, 196, 253, -6])
T2D = torch.tensor([token in TOKENS for token in range(VOCAB)])


def as_safetensors(folder: Path, **tensors: Tensor) -> Path:
    save_file({"midlayer.mlp.weight": torch.zeros(2, 2), **tensors}, folder / "model.safetensors")
    return folder / "model.safetensors"


def as_pt(folder: Path, **tensors: Tensor) -> Path:
    torch.save(tensors, folder / "vocab_mapping.pt")
    return folder / "vocab_mapping.pt"


def as_npz(folder: Path, **tensors: Tensor) -> Path:
    np.savez(folder / "mapping.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    return folder / "mapping.npz"


def as_npy(folder: Path, **tensors: Tensor) -> Path:
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
    return folder / "d2t.npy"


KINDS = [as_safetensors, as_pt, as_npz, as_npy]


def exported(dump: Path, dest: Path, to: str, **options: object) -> Path:
    export_dataset(ExportSettings(dump, to, dest, **options))
    return dest


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_every_kind_of_file_names_the_tokens_of_the_draft_ids(
    kind: Callable[..., Path], integers: torch.dtype, tmp_path: Path
) -> None:
    found = read_vocabulary(kind(tmp_path, d2t=D2T.to(integers), t2d=T2D), None)
    assert (found.token_ids.tolist(), found.V) == (TOKENS, VOCAB)
    assert torch.equal(found.d2t, D2T)
    assert torch.equal(found.t2d, T2D)


def test_a_file_without_t2d_takes_the_size_of_the_target(tmp_path: Path) -> None:
    path = as_pt(tmp_path, d2t=D2T)
    assert read_vocabulary(path, VOCAB).V == VOCAB
    with pytest.raises(LayoutError, match=r"holds no t2d, .* give --target-vocab-size, or a head"):
        read_vocabulary(path, None)


@pytest.mark.parametrize(
    ("d2t", "t2d", "V", "text"),
    [
        (D2T.tolist(), T2D, 300, "t2d is of a target of 259 tokens, and this one has 300"),
        ([300, 0], None, VOCAB, r"draft id 0 is target token 300 by its d2t of 300; expected 0\.\.258"),
        ([0, -2], None, VOCAB, "draft id 1 is target token -1"),
        ([255, 256, 258], None, VOCAB, "Does d2t hold target ids instead of offsets"),
        ([5, 4, 1], None, VOCAB, "draft ids 0 and 1 are both target token 5"),
        ([0.5, 1.0], None, VOCAB, r"expected d2t as \(D,\) integers, .*found \(2,\) float32"),
        ([[1, 2]], None, VOCAB, r"found \(1, 2\) int64"),
        ([], None, VOCAB, r"found \(0,\)"),
        (D2T.tolist(), torch.ones(VOCAB, dtype=torch.bool), VOCAB, "t2d has target token 1, which d2t does not name"),
        (D2T.tolist(), torch.zeros(VOCAB, dtype=torch.bool), VOCAB, "t2d lacks target token 0, which d2t names"),
        (D2T.tolist(), torch.arange(VOCAB), VOCAB, r"expected t2d as \(V,\) bool"),
    ],
)
def test_a_mapping_that_is_none_is_refused_by_what_is_wrong(
    d2t: list[object], t2d: Tensor | None, V: int, text: str, tmp_path: Path
) -> None:
    tensors = {"d2t": torch.tensor(d2t)} | ({} if t2d is None else {"t2d": t2d})
    with pytest.raises(LayoutError, match=text):
        read_vocabulary(as_pt(tmp_path, **tensors), V)


def test_files_that_hold_no_mapping_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="holds no d2t; expected d2t"):
        read_vocabulary(as_safetensors(tmp_path), VOCAB)
    with pytest.raises(LayoutError, match="is no file"):
        read_vocabulary(tmp_path / "gone.pt", VOCAB)
    (tmp_path / "mapping.json").write_text("{}")
    with pytest.raises(LayoutError, match="of no known kind"):
        read_vocabulary(tmp_path / "mapping.json", VOCAB)
    for name in ("torn.safetensors", "torn.npz", "torn.npy", "torn.pt"):
        (tmp_path / name.replace("torn.npy", "d2t.npy")).write_bytes(b"torn")
        with pytest.raises(LayoutError, match="cannot be read"):
            read_vocabulary(tmp_path / name.replace("torn.npy", "d2t.npy"), VOCAB)


@pytest.mark.parametrize(
    ("to", "options", "written"),
    [
        ("specforge", {"algorithm": "eagle3"}, "vocab_mapping/vocab_mapping.pt"),
        ("angelslim", {"algorithm": "eagle3"}, "vocab_mapping.pt"),
        ("speculators", {}, "d2t.npy"),
    ],
)
def test_a_vocabulary_goes_through_an_export_and_back_as_it_was(
    dump: Path, tmp_path: Path, to: str, options: dict[str, str], written: str
) -> None:
    if to == "speculators":
        pytest.importorskip("datasets")
    first = exported(dump, tmp_path / "a", to, draft_vocab=as_npz(tmp_path, d2t=D2T, t2d=T2D), **options)
    second = exported(dump, tmp_path / "b", to, draft_vocab=first / written, **options)
    for dest in (first, second):
        found = read_vocabulary(dest / written, None)
        assert torch.equal(found.d2t, D2T)
        assert torch.equal(found.t2d, T2D)


def test_the_teachers_probabilities_are_in_the_order_of_the_draft_ids(
    dump32: Path, expected32: list[Expected], tmp_path: Path
) -> None:
    path = as_pt(tmp_path, d2t=D2T, t2d=T2D)
    dest = exported(dump32, tmp_path / "d", "automodel-eagle3", draft_vocab=path)
    manifest = json.loads((dest / "manifest.json").read_text())
    assert (manifest["selected_token_ids"], manifest["draft_vocab_size"]) == (TOKENS, 7)
    found = load_file(dest / "shard-000000.safetensors")["target_probs"][0]
    due = expected32[0].logits[1:][:, TOKENS].float().softmax(-1)
    torch.testing.assert_close(found[: len(due)], due, atol=1e-5, rtol=1e-4)


def test_a_second_run_needs_the_same_tokens_wherever_their_file_lies(dump: Path, tmp_path: Path) -> None:
    asked = {"to": "specforge", "dest": tmp_path / "d", "algorithm": "eagle3"}
    export_dataset(ExportSettings(dump, draft_vocab=as_pt(tmp_path, d2t=D2T, t2d=T2D), **asked))
    export_dataset(ExportSettings(dump, draft_vocab=as_npz(tmp_path, d2t=D2T, t2d=T2D), **asked))
    other = as_safetensors(tmp_path, d2t=torch.tensor([1, 1]))
    with pytest.raises(UsageError, match=r"(?s)holds another export; .*options.draft_vocab"):
        export_dataset(ExportSettings(dump, draft_vocab=other, **asked))


def test_a_size_beside_a_vocabulary_is_refused(dump: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--draft-vocab-size\) and it exclude each other"):
        ExportSettings(dump, "specforge", tmp_path / "d", draft_vocab=tmp_path / "v.pt", draft_vocab_size=9)
