"""A tokenizer that is code is refused without the flag: transformers would split the text in its own way."""

import base64
import json
from pathlib import Path

import pytest

from hiddentap.models.errors import UsageError
from hiddentap.models.tokenizer_files import TokenizerCodeError, require_code_allowed
from support.templates import CHATML, byte_tokenizer


def require(folder: Path, *, trust: bool = False) -> None:
    require_code_allowed(str(folder), None, trust_remote_code=trust)


def tiktoken_folder(folder: Path, settings: object) -> Path:
    """A vocabulary of the 256 bytes in tiktoken's file form, as Kimi publishes its own."""
    folder.mkdir()
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    "auto_map",
    [{"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"},
     ["tokenization_kimi.TikTokenTokenizer", None]],
    ids=["pair", "one", "old"],
)  # fmt: skip
def test_code_that_makes_the_ids_has_to_be_allowed(auto_map: object, tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path / "kimi", {"auto_map": auto_map})
    with pytest.raises(
        TokenizerCodeError, match=r"\(tokenization_kimi\.TikTokenTokenizer\), .* allow it with --trust-remote-code"
    ):
        require(folder)
    require(folder, trust=True)


def test_a_vocabulary_without_its_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerCodeError, match=r"tiktoken\.model, which does not say how text is split"):
        require(tiktoken_folder(tmp_path / "bare", {}))


def test_a_tokenizer_json_needs_no_code(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, CHATML)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}))
    require(tmp_path)


@pytest.mark.parametrize("settings", ["{", "[]"], ids=["cut", "a list"])
def test_settings_that_are_no_object_are_named(settings: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is no JSON object"):
        require(tmp_path)


def test_the_encoder_of_a_run_refuses_it(tmp_path: Path) -> None:
    from hiddentap.capture.data.encoder import load_tokenizer

    with pytest.raises(UsageError, match="--trust-remote-code"):
        load_tokenizer(
            str(tiktoken_folder(tmp_path / "kimi", {"auto_map": {"AutoTokenizer": ["a.B", None]}})), None, False
        )
