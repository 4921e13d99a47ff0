"""An adapter (LoRA and the like) on a model: the one beside its weights, another one, or none; peft applies it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError
from .hub import file_of

CONFIG_FILE = "adapter_config.json"
NO_ADAPTER = "none"
# Keeps transformers from applying what it finds beside the weights: it looks in this folder of the model, which is not there.
NOT_BY_LOADING = {"adapter_kwargs": {"subfolder": ".no-adapter"}}
_BASE_ALONE = f"say --peft {NO_ADAPTER} for the base model alone"


class PeftAdapterError(CheckpointError):
    """An adapter that cannot be applied."""


@dataclass(frozen=True)
class PeftAdapter:
    """The adapter that a model is to have.

    Attributes:
        place: folder or hub id. revision: of a hub id.
        folder: where its config is on this machine.
        is_beside: whether it lies beside the weights of the model.
    """

    place: str
    revision: str | None
    folder: Path
    is_beside: bool

    @classmethod
    def of(cls, asked: str | None, name: str, revision: str | None) -> PeftAdapter | None:
        """Return the adapter of a model; None for the base model alone.

        Args:
            asked: a folder or hub id, or ``none``; None takes the adapter beside the weights, where there is one.
            name, revision: of the model. Its adapter may be on the hub alone, so the hub is asked where there is one.

        Raises:
            PeftAdapterError: there is no adapter where one was asked for.
        """
        if asked == NO_ADAPTER:
            return None
        place, revision = (name, revision) if asked is None else (asked, None)
        try:
            found = file_of(place, revision, CONFIG_FILE)
        except (OSError, ValueError) as error:
            raise PeftAdapterError(f"the adapter {place} cannot be read: {_first_line(error)}") from error
        if found is not None:
            return cls(place, revision, found.parent, is_beside=asked is None)
        if asked is not None:
            raise PeftAdapterError(
                f"{asked} holds no adapter: expected a folder or a hub id with {CONFIG_FILE}, or {NO_ADAPTER} for the base model "
                "alone."
            )
        return None

    def __str__(self) -> str:
        return f"an adapter beside its weights ({CONFIG_FILE})" if self.is_beside else f"the adapter {self.place}"

    @property
    def sha256(self) -> str:
        """Return a hash of its config and weights; raises PeftAdapterError where it has no weights."""
        weights = sorted(self.folder.glob("adapter_model.*"))
        if not weights:
            raise PeftAdapterError(f"{self.folder} holds {CONFIG_FILE} and no adapter_model.* file; fetch it again.")
        digest = hashlib.sha256()
        for path in (self.folder / CONFIG_FILE, *weights):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        return digest.hexdigest()

    def require_peft(self, name: str) -> None:
        """Raise PeftAdapterError where peft, which applies it, is not installed."""
        if find_spec("peft") is None:
            raise PeftAdapterError(
                f"{name} holds {self}, which needs the package peft: pip install peft. Or {_BASE_ALONE}."
            )

    def apply(self, model: Any, name: str) -> list[str]:
        """Put it on `model`, which has none; return notes worth reading.

        Raises:
            PeftAdapterError: peft cannot apply it, or its weights and the modules of the model do not match.
        """
        try:
            info = model.load_adapter(self.place, adapter_kwargs={"revision": self.revision} if self.revision else None)
        except Exception as error:  # peft raises many kinds over configs and shapes
            raise PeftAdapterError(
                f"{self} cannot be applied to {name}: {_first_line(error)}. Merge it into the weights, or {_BASE_ALONE}."
            ) from error
        for words, found in (("lacks", info.missing_keys), ("has unknown", info.unexpected_keys)):
            if found:
                raise PeftAdapterError(
                    f"{self} is none of {name}: it {words} {len(found)} weight(s), such as {min(map(str, found))}."
                )
        if not getattr(model, "_hf_peft_config_loaded", False):
            raise PeftAdapterError(
                f"{name} holds {self}, and loading did not apply it. Merge it into the weights, or {_BASE_ALONE}."
            )
        where = CONFIG_FILE if self.is_beside else self.place
        return [f"the adapter of {where} is applied ({', '.join(model.peft_config)})", *self._other_base(name)]

    def _other_base(self, name: str) -> list[str]:
        """Return a note where its config names another base model, which may be the same under another name."""
        base = json.loads((self.folder / CONFIG_FILE).read_bytes()).get("base_model_name_or_path")
        if not base or Path(str(base)).name == Path(name).resolve().name:
            return []
        return [f"the adapter was made for {base}; check that {name} is that model"]


def require_no_adapter(adapter: PeftAdapter | None, name: str) -> None:
    """Raise PeftAdapterError where there is an adapter: for an engine that would leave it out."""
    if adapter is not None:
        raise PeftAdapterError(
            f"{name} holds {adapter}, which --engine vllm would leave out. Take --engine hf, merge the adapter into the weights, "
            f"or {_BASE_ALONE}."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
