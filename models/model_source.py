"""The model that a user names, and how it is to compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checked_fields import CheckedFields
from .choices import DtypeName, dtype_name
from .errors import UsageError, UsageTypeError
from .native_class import has_native_class
from .peft_adapter import NO_ADAPTER


class ModelLoadError(UsageError):
    """A model that cannot be loaded as asked."""


@dataclass(frozen=True)
class ModelSource(CheckedFields):
    """A model by name, and how it computes.

    Attributes:
        name: a folder or a hub id.
        revision: branch, tag or commit of a hub model.
        dtype: how the model computes, such as ``float32`` or ``bf16``; ``auto`` takes its config's.
        device: ``auto`` takes the accelerator where there is one. Without effect where `device_map` is given.
        device_map: of accelerate, such as ``auto``, to spread the layers over devices.
        attn_implementation: of transformers, such as ``eager`` or ``sdpa``; None takes the model's default.
        trust_remote_code: let code that comes with the model run, where transformers has no class of its own for it.
        keep_quantized: compute FP8 and compressed-tensors weights in their own arithmetic, which rounds activations too, instead
            of dequantizing them.
        peft: an adapter to put on the model, a folder or hub id; ``none`` leaves out the one that lies beside its weights, and
            None takes that one.

    Raises:
        ModelLoadError: a value that cannot be used; UsageTypeError for a wrong type.

    Example:
        >>> ModelSource("MODEL", dtype="bf16", device="cpu").dtype
        'bfloat16'
    """

    name: str
    revision: str | None = None
    dtype: DtypeName = "auto"
    device: str = "auto"
    device_map: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    keep_quantized: bool = False
    peft: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        try:
            super().__post_init__()
        except UsageTypeError:
            raise
        except UsageError as error:
            raise ModelLoadError(str(error)) from error

    @property
    def place(self) -> str:
        """Where model and tokenizer are, from any working directory: the absolute path of a folder, or the hub id."""
        return str(Path(self.name).resolve()) if Path(self.name).is_dir() else self.name

    @property
    def peft_place(self) -> str | None:
        """Where the adapter is, from any working directory: the absolute path of a folder, or the hub id; ``none`` as given."""
        is_folder = self.peft not in (None, NO_ADAPTER) and Path(str(self.peft)).is_dir()
        return str(Path(str(self.peft)).resolve()) if is_folder else self.peft

    def runs_code_of(self, config: Any) -> bool:
        """Return whether the model's class is code that comes with it."""
        return self.trust_remote_code and not has_native_class(config)

    def require_device(self) -> None:
        """Raise ModelLoadError where the model would be loaded onto a device that is not on this machine."""
        if self.device_map is None:
            self.torch_device  # noqa: B018 - raises

    @property
    def torch_device(self) -> torch.device:
        """Return the device that the model is to compute on.

        Raises:
            ModelLoadError: no kind of device that torch knows, or one that is not on this machine.
        """
        here = torch.accelerator.current_accelerator(check_available=True)
        if self.device == "auto":
            return here or torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ModelLoadError(f"unknown device {self.device!r}: {first_line(error)}") from error
        if device.type == "cpu":
            return device
        count = torch.accelerator.device_count() if here is not None and here.type == device.type else 0
        if (device.index or 0) >= count:
            found = f"{torch.accelerator.device_count()} x {here.type}" if here else "the CPU alone"
            raise ModelLoadError(
                f"there is no device {self.device!r} here: torch {torch.__version__} finds {found}. Choose one of these, or auto."
            )
        return device


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or of its repr where it has none."""
    return (str(error).strip() or repr(error)).splitlines()[0]
