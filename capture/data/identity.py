"""Hashes of what tokenized a run's rows."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from ...models.errors import UsageError
from .encoder import RecordEncoder
from .masks.loss_mask import LossMasks


@dataclass(frozen=True)
class TokenisationIdentity:
    """Two runs with equal identities make equal samples of equal rows.

    Hashes are SHA-256 in hex: of the tokenizer as canonical JSON (None where there is none, and records are token ids), of
    the template's text (None where there is none). `template_args` is canonical JSON. `template_date` is None where the
    template does not ask for it. `mask_rule` is the one for conversations without tools, None without a template.
    """

    tokenizer_sha256: str | None
    template_sha256: str | None
    template_args: str
    template_date: str | None
    mask_rule: str | None
    loss_on: str
    on_dropped: str
    think: str
    ids_format: str
    max_length: int
    on_too_long: str
    strict: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def identity_of(encoder: RecordEncoder) -> TokenisationIdentity:
    """Return the identity of an encoder."""
    options = encoder.options
    tokenizer = encoder.tokenizer if encoder.has_tokenizer else None
    template = options.chat_template or (None if tokenizer is None else tokenizer.chat_template)
    # A tokenizer can have several templates by name; which one a record gets depends on the record.
    template = _canonical(template) if isinstance(template, dict) else template
    return TokenisationIdentity(
        tokenizer_sha256=None if tokenizer is None else _sha256(_canonical(_tokenizer_values(tokenizer))),
        template_sha256=None if template is None else _sha256(template),
        template_args=_canonical(dict(options.template_args)),
        template_date=options.date.isoformat() if template and "strftime_now" in template else None,
        mask_rule=None if tokenizer is None else _mask_rule(encoder),
        loss_on=options.loss_on,
        # Whether such a row ends the run changes no sample.
        on_dropped="keep" if options.on_dropped == "keep" else "reject",
        think=options.think,
        ids_format=options.ids_format,
        max_length=options.max_length,
        on_too_long=options.on_too_long,
        strict=options.strict,
    )


def _mask_rule(encoder: RecordEncoder) -> str | None:
    try:
        return LossMasks(encoder.template, encoder.options.loss_on).rule()
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
