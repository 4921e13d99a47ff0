"""The decoder layers of a causal language model, found by structure and not by a table of names.

The layers are the module list, under what the model itself calls its decoder, whose children are all marked as decoder
layers (transformers' ``GradientCheckpointingLayer``, or a class in ``_no_split_modules``); a list as long as the config
says comes first. Where nothing is marked, the model is run over a few tokens and the layers are the blocks that feed each
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .adapter_names import adapter_named, adapter_of_structure
from .adapters import Adapter, Site, output_site
from .call import input_embedding
from .config import stated_depth
from .config import text_config as text_config
from .errors import UsageError
from .modules import unwrapped as unwrapped
from .probing import ProbingError, fed_lists

Layers = tuple[nn.Module, ...]
FoundBy = Literal["structure", "probing"]


class DecoderNotFoundError(UsageError):
    """The model's decoder layers cannot be told."""


@dataclass(frozen=True)
class Decoder:
    """The decoder of one model.

    Attributes:
        model: the whole model, the one whose forward is called.
        layers_path: where the layer list is, such as ``model.layers``.
        layers: the n decoder layers in order, as they are called (wrappers of compilation or checkpointing included).
        widths: the values that the hidden width H may have: the embedding width and what the config states.
        vocab_rows: rows of the input embedding; every token id must be below it. None where the model shows none.
        found_by: what told the layers.
        adapter: how the residual stream is read where that is not plain; None where it is.
    """

    model: nn.Module
    layers_path: str
    layers: Layers
    widths: frozenset[int]
    vocab_rows: int | None
    found_by: FoundBy = "structure"
    adapter: Adapter | None = None

    @property
    def n(self) -> int:
        return len(self.layers)

    @property
    def adapter_name(self) -> str | None:
        """Return the name of the adapter, as a file's header tells it."""
        return None if self.adapter is None else self.adapter.name

    def layer_path(self, index: int) -> str:
        return f"{self.layers_path}.{index}"

    def site(self, boundary: int) -> Site:
        """Return the site at which `boundary` is read."""
        if self.adapter is not None:
            return self.adapter.site(boundary)
        return output_site(self.layers, self.layers_path, boundary)

    def has_width(self, width: int) -> bool:
        """Return whether the state of a boundary may be `width` wide."""
        if self.adapter is not None:
            return self.adapter.has_width(width)
        return not self.widths or width in self.widths

    def modules_outside_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module that is neither a decoder layer nor inside or around one, with its path."""
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        for path, module in self.model.named_modules():
            if id(module) not in inside and not f"{self.layers_path}.".startswith(f"{path}." if path else ""):
                yield path, module


def find_decoder(model: nn.Module, *, adapter: str | None = None) -> Decoder:
    """Find the decoder layers of `model`.

    Args:
        adapter: the name of the adapter that reads the residual stream; None reads it plainly, or as the structure leaves
            no choice about.

    Raises:
        DecoderNotFoundError: an encoder-decoder model, ``nn.DataParallel``, or no single list of decoder layers.
        AdapterError: no adapter has that name, or the layers have not the structure that it reads.
    """
    if isinstance(model, nn.DataParallel):
        raise DecoderNotFoundError(
            "nn.DataParallel is not supported: its replicas share one set of hooks. "
            "Pass model.module, or run one process a device."
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise DecoderNotFoundError(
            f"{type(model).__name__} is an encoder-decoder model; expected a causal language model."
        )
    widths, vocab_rows = _widths(model, config)
    path, layers, found_by = _layers(model, stated_depth(config), vocab_rows)
    owner = model.get_submodule(path.rpartition(".")[0])
    reading = (
        adapter_of_structure(layers, path, owner, widths)
        if adapter is None
        else adapter_named(adapter, layers, path, owner, widths)
    )
    return Decoder(model, path, layers, widths, vocab_rows, found_by, reading)


def _layers(model: nn.Module, depth: int | None, vocab_rows: int | None) -> tuple[str, Layers, FoundBy]:
    root_path, root = _language_root(model)
    marked = _marked_lists(model, root_path, root, depth)
    if marked:
        return *_the_only(marked, model, depth), "structure"
    try:
        fed = fed_lists(model, root_path, vocab_rows)
    except ProbingError as failed:
        raise DecoderNotFoundError(
            f"{_cannot_tell(model)}: nothing in its structure marks a list of them, found none by name or class, and it "
            f"did not run on a few token ids to be watched ({failed.__cause__!r})."
        ) from failed
    return *_the_only(fed, model, depth), "probing"


def _language_root(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the model's own decoder if that holds module lists, else the model; with its path.

    Some models answer with an output projection, or with a module that holds no layers.
    """
    get_decoder = getattr(model, "get_decoder", None)
    root = get_decoder() if callable(get_decoder) else model
    has_lists = isinstance(root, nn.Module) and any(isinstance(m, nn.ModuleList) for m in root.modules())
    if not has_lists:
        return "", model
    path = next((path for path, module in model.named_modules() if module is root), None)
    if path is None:
        raise DecoderNotFoundError(f"get_decoder() of {type(model).__name__} returned a module that is not part of it.")
    return path, root


def _marked_lists(model: nn.Module, root_path: str, root: nn.Module, depth: int | None) -> list[tuple[str, Layers]]:
    """Return the outermost lists whose children are all marked as decoder layers, those of the stated depth first."""
    no_split = {name for m in (model, root) for name in getattr(m, "_no_split_modules", None) or ()}
    marked = [
        (path, module)
        for path, module in root.named_modules(prefix=root_path)
        if isinstance(module, nn.ModuleList) and len(module) and all(_is_marked(child, no_split) for child in module)
    ]
    of_depth = [(path, module) for path, module in marked if len(module) == depth]
    found = of_depth or marked
    shallowest = min((path.count(".") for path, _ in found), default=0)
    return [(path, tuple(module)) for path, module in found if path.count(".") == shallowest]


def _the_only(found: list[tuple[str, Layers]], model: nn.Module, depth: int | None) -> tuple[str, Layers]:
    if len(found) != 1:
        seen = ", ".join(f"{path} ({len(layers)} x {type(layers[0]).__name__})" for path, layers in found) or "none"
        raise DecoderNotFoundError(
            f"{_cannot_tell(model)}: expected one list of {depth if depth is not None else 'its'} layers, found {seen}."
        )
    return found[0]


def _cannot_tell(model: nn.Module) -> str:
    return f"cannot tell which modules of {type(model).__name__} are its decoder layers"


def _is_marked(layer: nn.Module, no_split: set[str]) -> bool:
    layer = unwrapped(layer)
    return isinstance(layer, GradientCheckpointingLayer) or any(c.__name__ in no_split for c in type(layer).__mro__)


def _widths(model: nn.Module, config: Any) -> tuple[frozenset[int], int | None]:
    """Return the possible hidden widths and the rows of the embedding, from tensors first: configs may state neither."""
    widths = {w for w in [getattr(text_config(config), "hidden_size", None)] if isinstance(w, int)}
    embedding = input_embedding(model)
    weight = getattr(embedding, "weight", None)
    if weight is None or weight.ndim != 2:
        return frozenset(widths), None
    return frozenset(widths | {int(weight.shape[1])}), int(weight.shape[0])
