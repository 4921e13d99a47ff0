"""Decoder layers of a model whose structure tells nothing, found by watching what feeds what.

The model runs once over a few tokens. The layers are the list of blocks in which what leaves one block is, bit for bit, what
enters the next that runs; neither names nor lengths are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import StreamError, floating, items_of
from .call import eagerly, few_ids, without_cache
from .modules import same_bits

_B, _S = 2, 5


class ProbingError(Exception):
    """The model could not be run on a few tokens; the cause is the error it raised."""


def fed_lists(model: nn.Module, root_path: str, vocab_rows: int | None) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Return the lists of blocks under `root_path` that feed each other in order, outermost ones only, each with its path.

    Raises:
        ProbingError: the model does not run on (2, 5) token ids.
    """
    chains = [_Chain(path, blocks) for path, blocks in _lists_of_blocks(model, root_path)]
    _run_watched(model, chains, vocab_rows)
    found = [chain for chain in chains if chain.is_chain]
    return [(c.path, c.blocks) for c in found if not any(c.path.startswith(f"{o.path}.") for o in found)]


@dataclass
class _Chain:
    """Observations of one list of blocks: the order of their calls, and whether each fed the next."""

    path: str
    blocks: tuple[nn.Module, ...]
    order: list[int] = field(default_factory=list)
    left: Tensor | None = None
    unbroken: bool = True

    @property
    def is_chain(self) -> bool:
        first_calls = list(dict.fromkeys(self.order))
        return self.unbroken and len(first_calls) > 1 and first_calls == sorted(first_calls)

    def entered(self, state: Tensor | None) -> None:
        if self.order and (self.left is None or state is None or not _same(self.left, state)):
            self.unbroken = False

    def left_block(self, i: int, state: Tensor | None) -> None:
        self.order.append(i)
        self.left = state if state is None or state.is_meta else state.clone()
        if state is None or state.ndim < 3:
            self.unbroken = False


def _lists_of_blocks(model: nn.Module, root_path: str) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    root = model.get_submodule(root_path)
    for path, module in root.named_modules(prefix=root_path):
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            blocks = tuple(module)
            if all(any(True for _ in block.children()) for block in blocks):
                yield path, blocks


@torch.no_grad()
def _run_watched(model: nn.Module, chains: list[_Chain], vocab_rows: int | None) -> None:
    handles = []
    for chain in chains:
        for i, block in enumerate(chain.blocks):
            handles.append(block.register_forward_pre_hook(_Enter(chain), with_kwargs=True))
            handles.append(block.register_forward_hook(_Leave(chain, i)))
    try:
        with eagerly(model):
            model(few_ids(model, vocab_rows, _B, _S), **without_cache(model))
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise ProbingError from error
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Enter:
    chain: _Chain

    def __call__(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        try:
            self.chain.entered(floating(args, kwargs or {})[0])
        except StreamError:
            self.chain.entered(None)


@dataclass(frozen=True)
class _Leave:
    chain: _Chain
    i: int

    def __call__(self, _block: nn.Module, _args: Any, output: Any) -> None:
        try:
            self.chain.left_block(self.i, items_of(output)[0])
        except StreamError:
            self.chain.left_block(self.i, None)


def _same(left: Tensor, entered: Tensor) -> bool:
    if left.is_meta:  # a skeleton has no values: what feeds the next block is then the very tensor
        return left is entered
    return left.is_floating_point() and same_bits(left, entered)
