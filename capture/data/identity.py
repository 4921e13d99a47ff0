"""What tokenised a run's rows, as hashes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from ...models.errors import UsageError
from .loss_mask import LossMasks
from .tokeniser import Tokeniser


@dataclass(frozen=True)
class TokenisationIdentity:
    """Two runs with equal identities make equal samples of equal rows.

    Hashes are SHA-256 in hex: of the tokenizer as canonical JSON, of the template's text (None where there is none).
    `template_args` is canonical JSON. `template_date` is None where the template does not ask for it. `mask_rule` is
    the one for conversations without tools, None without a template.
    """

    tokenizer_sha256: str
    template_sha256: str | None
    template_args: str
    template_date: str | None
    mask_rule: str | None
    loss_on: str
    think: str
    ids_format: str
    max_length: int
    on_too_long: str
    strict: bool

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def identity_of(tokeniser: Tokeniser) -> TokenisationIdentity:
    """The identity of a tokeniser."""
    options = tokeniser.options
    template = _template_text(tokeniser)
    return TokenisationIdentity(
        tokenizer_sha256=_sha256(_canonical(_tokenizer_values(tokeniser.tokenizer))),
        template_sha256=None if template is None else _sha256(template),
        template_args=_canonical(dict(options.template_args)),
        template_date=options.date.isoformat() if template and "strftime_now" in template else None,
        mask_rule=_mask_rule(tokeniser),
        loss_on=options.loss_on,
        think=options.think,
        ids_format=options.ids_format,
        max_length=options.max_length,
        on_too_long=options.on_too_long,
        strict=options.strict,
    )


def _template_text(tokeniser: Tokeniser) -> str | None:
    text = tokeniser.options.chat_template or tokeniser.tokenizer.chat_template
    # A tokenizer can have several templates by name; which one a row gets depends on the row.
    return _canonical(text) if isinstance(text, dict) else text


def _mask_rule(tokeniser: Tokeniser) -> str | None:
    try:
        return LossMasks(tokeniser.template, tokeniser.options.loss_on).rule()
    except UsageError:
        return None


def _tokenizer_values(tokenizer: Any) -> dict[str, Any]:
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if tokenizer.is_fast:
        return {"backend": json.loads(tokenizer.backend_tokenizer.to_str()), "special_tokens": special}
    return {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "special_tokens": special}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
