"""Tokenizers that are missing, fail, know nothing, or make other ids than their files say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hiddentap.capture.data import RecordEncoder, TokeniseOptions, identity_of
from hiddentap.capture.run import CaptureSettings, capture_dataset
from hiddentap.capture.store import CapturedDataset
from hiddentap.models.errors import UsageError
from support import tiny
from support.model_folder import llama_folder, write_rows
from support.rows import reject_of, sample_of, tokenise_rows, turns
from support.templates import CHATML, byte_tokenizer, save

Run = Callable[..., tuple[int, str, str]]
FAILING = """
from transformers import PreTrainedTokenizer

class Failing(PreTrainedTokenizer):
    def __init__(self, **kwargs):
        {statement}
"""


def failing_tokenizer(folder: Path, statement: str) -> str:
    folder.mkdir()
    (folder / "tokenization_failing.py").write_text(FAILING.format(statement=statement))
    config = {"tokenizer_class": "Failing", "auto_map": {"AutoTokenizer": ["tokenization_failing.Failing", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return str(folder)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise TypeError('bad vocab')", "TypeError: bad vocab"),
        ("assert kwargs is None, 'no vocabulary'", "AssertionError: no vocabulary"),
        ("1 // 0", "ZeroDivisionError: "),
        ("raise RuntimeError('first\\n' + 'second')", "RuntimeError: first;"),
    ],
)
def test_a_tokenizer_whose_code_fails_is_one_line(tmp_path: Path, statement: str, said: str) -> None:
    tokenizer = failing_tokenizer(tmp_path / "t", statement)
    with pytest.raises(UsageError) as error:
        tokenise_rows(tmp_path, tokenizer, {"text": "a"}, trust_remote_code=True)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_capture_of_a_tokenizer_whose_code_fails_is_code_2(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tiny.build_llama(vocab_size=64, pad_token_id=None).save_pretrained(folder)
    failing_tokenizer(tmp_path / "t", "raise TypeError('bad vocab')")
    for name in ("tokenization_failing.py", "tokenizer_config.json"):
        (folder / name).write_text((tmp_path / "t" / name).read_text())
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a"}])
    code, _, err = run(
        "capture",
        "--model",
        folder,
        "--data",
        data,
        "--layer-ids",
        "1",
        "--out",
        tmp_path / "out",
        "--trust-remote-code",
    )
    assert code == 2
    assert "its code failed with TypeError: bad vocab" in err
    assert "Traceback" not in err


def test_rows_of_ids_need_no_tokenizer_and_texts_say_that_they_do(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    none = str(tmp_path / "none")
    sample = sample_of(tmp_path, none, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 1])
    encoder = RecordEncoder(TokeniseOptions(tokenizer=none))
    assert (identity_of(encoder).tokenizer_sha256, encoder.notes()) == (None, ())
    for row in ({"text": "a"}, {"messages": turns("a", "b")}):
        with pytest.raises(UsageError, match=r"expected a tokenizer at .*none; it cannot be loaded"):
            tokenise_rows(tmp_path, none, row)


def test_a_model_without_tokenizer_files_is_captured_over_rows_of_ids(tmp_path: Path) -> None:
    model = tmp_path / "m"
    tiny.build_llama(vocab_size=64, pad_token_id=None).save_pretrained(model)
    data = write_rows(tmp_path / "d.jsonl", [{"id": "a", "input_ids": [5, 6, 7]}])
    for _ in range(2):  # the second one takes the plan up again
        summary = capture_dataset(CaptureSettings(str(model), (str(data),), tmp_path / "out", layer_ids=(1,)))
        assert (summary.captured, summary.tokens) == (1, 3)
    assert CapturedDataset(tmp_path / "out")[0]["input_ids"].tolist() == [5, 6, 7]


def test_a_class_that_makes_other_ids_than_tokenizer_json_is_noted(run: Run, tmp_path: Path) -> None:
    plain = byte_tokenizer(tmp_path / "plain", CHATML)
    assert RecordEncoder(TokeniseOptions(tokenizer=plain)).notes() == ()

    model = llama_folder(tmp_path / "m")
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    backend.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    (note,) = RecordEncoder(TokeniseOptions(tokenizer=str(model))).notes()
    assert "GPT2Tokenizer" in note
    assert "makes other token ids than its tokenizer.json says" in note
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a b"}])
    assert "GPT2Tokenizer" in run("audit", "--model", model, "--data", data)[2]
    code, out, err = run("capture", "--model", model, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    assert (code, "GPT2Tokenizer" in out, "GPT2Tokenizer" in err) == (0, True, True)


def word_tokenizer(folder: Path, words: dict[str, int]) -> str:
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return save(folder, backend, CHATML, unk_token="[UNK]")


def test_tokens_that_the_tokenizer_does_not_know_are_counted_or_reject_the_row(tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "t", {"[UNK]": 0, "a": 1, "b": 2})
    assert sample_of(tmp_path, words, {"text": "a b"}).warnings == ()
    assert sample_of(tmp_path, words, {"text": "a c b a"}).warnings == ("unknown_tokens",)
    assert reject_of(tmp_path, words, {"text": "a c b a"}, strict=True).code == "unknown_tokens"
    reject = reject_of(tmp_path, words, {"text": "c d a"})
    assert (reject.code, "found '[UNK]' for 2 of 3" in reject.reason) == ("unknown_tokens", True)
    assert sample_of(tmp_path, words, {"input_ids": [0, 0]}).warnings == ()


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    empty = word_tokenizer(tmp_path / "t", {"[UNK]": 0})
    with pytest.raises(UsageError, match=r"expected a tokenizer with a vocabulary at .*found 1 tokens"):
        tokenise_rows(tmp_path, empty, {"text": "a"})
