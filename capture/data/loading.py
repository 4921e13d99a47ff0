"""Loading a run's tokenizer, and what its class makes of the files it was loaded from."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ...models.errors import HiddentapError, UsageError
from ...models.hub import file_of, unreachable
from ...models.tokenizer_files import require_code_allowed
from .errors import first_line

# White space, digits, contractions, case, other scripts and code: where pre-tokenizers and normalizers differ.
_PROBE = "Don't  stop: 12345 is it? Ünïcode, 日本語 и Ελληνικά 😀\n\n\tdef f(x_1):\n        return x_1 ** 2  # end\r\n A\u00a0b"


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a folder or hub id. Raises UsageError where there is none that can be loaded, or an empty one."""
    fault = unreachable(name)
    if fault is not None:
        raise UsageError(f"expected a tokenizer at {name}; it cannot be loaded: {fault}")
    require_code_allowed(name, revision, trust_remote_code=trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except HiddentapError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"expected a tokenizer at {name}; it cannot be loaded: {error}") from error
    except Exception as error:
        raise UsageError(
            f"expected a tokenizer at {name}; its code failed with {first_line(error)}; it may be made for other versions of "
            "transformers"
        ) from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise UsageError(
            f"expected a tokenizer with a vocabulary at {name}; found {len(tokenizer)} tokens, all of them special; the files "
            "of its vocabulary are missing"
        )
    return tokenizer


def other_ids_than_its_file(tokenizer: Any, name: str, revision: str | None) -> str | None:
    """Return a note where the tokenizer's class makes other ids than its `tokenizer.json` says; None where it does not.

    A class named in tokenizer_config.json can put its own pre-tokenizer in place of the file's.
    """
    path = file_of(name, revision, "tokenizer.json")
    if path is None or not tokenizer.is_fast:
        return None
    try:
        plain = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        return f"{path} cannot be read on its own ({first_line(error)}); the ids of {type(tokenizer).__name__} are used"
    plain.no_padding()
    plain.no_truncation()
    ids = tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    said = plain.encode(_PROBE, add_special_tokens=False).ids
    if ids == said:
        return None
    return (
        f"{type(tokenizer).__name__}, the class that tokenizer_config.json of {name} names, makes other token ids than its "
        f"tokenizer.json says ({len(ids)} and {len(said)} for one text); rows have the ids of {type(tokenizer).__name__}. If "
        "the model was trained with those of the file, name PreTrainedTokenizerFast as tokenizer_class"
    )
