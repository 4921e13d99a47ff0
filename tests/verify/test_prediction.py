"""Final norm and lm_head on stored rows: beside the model's tokens, and, without a model, beside the text itself."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hiddentap.capture.verify import verify
from hiddentap.models.head import save_head
from support.captured import CHATS, captured
from support.damage import Columns, rewrite
from support.model_folder import VOCAB, llama_folder, model_folder
from support.tiny import build_llama


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the conversations: one that predicts nothing could tell nothing."""
    folder = llama_folder(tmp_path_factory.mktemp("trained"), seed=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build_llama(seed=3, vocab_size=VOCAB, pad_token_id=None).train()
    rows = [tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for row in CHATS]
    ids = torch.tensor([row[: min(map(len, rows))] for row in rows])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()
    return model_folder(folder, model.eval())


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(trained, tmp_path_factory.mktemp("captured") / "out", exact=True, head=True)


@pytest.fixture
def out(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "out"))


def test_the_head_alone_finds_nothing_in_a_good_folder_and_says_how_well_it_predicts(folder: Path) -> None:
    report = verify(folder, model="none")
    assert report.ok, str(report)
    assert report.compared == 0
    (reason, told) = report.notes
    assert reason == "no sample was compared with a model: not asked for"
    share = float(told.removeprefix("pre-norm through the head names the next token in ").split("%")[0])
    assert share > 70
    assert "a uniform guess -5.56" in told  # log 259


def forward(columns: Columns) -> None:
    columns["pre_norm"] = torch.cat([columns["pre_norm"][1:], columns["pre_norm"][:1]])


def backward(columns: Columns) -> None:
    columns["pre_norm"] = torch.cat([columns["pre_norm"][-1:], columns["pre_norm"][:-1]])


def normed(columns: Columns) -> None:
    columns["pre_norm"] = columns["post_norm"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (forward, "rows shifted by one: row t of pre-norm holds the state of token t+1"),
        (backward, "rows shifted by one: row t of pre-norm holds the state of token t-1"),
        (normed, "post-norm stored as pre-norm"),
    ],
)
def test_the_head_alone_names_what_the_rows_are_instead(
    damage: Callable[[Columns], None], said: str, out: Path
) -> None:
    rewrite(out, damage)
    report = verify(out, model="none")
    expected = f"{said} in 3 compared samples; in "
    found = [finding.what for finding in report.findings if finding.severity == "error"]
    assert [what.partition("'")[0] for what in found] == [expected, expected]
    assert all(what.endswith("' as the head and the text show") for what in found)


def test_the_head_is_put_on_the_last_boundary_where_no_norm_state_is_stored(trained: Path, tmp_path: Path) -> None:
    out = captured(trained, tmp_path / "out", head=True, final="none")
    assert verify(out, model="none").notes[1].startswith("layer 3 through the head names the next token in ")


def test_a_head_that_is_not_the_models_predicts_other_tokens(out: Path) -> None:
    shutil.rmtree(out / "head")
    save_head(out / "head", build_llama(seed=5, vocab_size=VOCAB, pad_token_id=None), "model.norm")
    found = verify(out).findings
    assert all(finding.what.startswith("final norm and lm_head on stored pre-norm predict") for finding in found)
    assert sum("in 3 compared samples" in finding.what for finding in found) == 2


def test_a_damaged_head_is_found(out: Path) -> None:
    (out / "head/head.safetensors").write_bytes(b"")
    found = [finding for finding in verify(out).findings if Path(finding.path).name == "head"]
    assert len(found) == 1
    assert found[0].what.startswith("the head cannot be read: ")
