"""Rows with images, and plain forwards that tell what their hidden rows are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiddentap import CaptureSettings, ModelSource


def asked(image: str | Path, question: str, answer: str, **fields: object) -> dict[str, Any]:
    """A conversation about one picture."""
    content = [{"type": "image", "image": str(image)}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **fields}


def settings(model: Path, data: Path, out: Path, **fields: Any) -> CaptureSettings:
    source = ModelSource(str(model), trust_remote_code=True)
    given = {"layer_ids": (0, 1, 3), "final": "both", "exact": True} | fields
    return CaptureSettings(model=source, data=(str(data),), out=out, **given)


def located(messages: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The same messages with pictures by their absolute paths."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for part in message["content"] if isinstance(message["content"], list) else ():
            for field in {"image", "path", "url"} & part.keys():
                part[field] = str(folder / part[field])
    return copied


@torch.no_grad()
def states(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a plain forward shows: the state into each layer ("into 0", ...), into and out of the final norm."""
    text, seen, handles = model.get_decoder(), {}, []

    def entering(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"]).clone()

        return hook

    def leaving(_module: nn.Module, _args: Any, output: Tensor) -> None:
        seen["post_norm"] = output.clone()

    for i, layer in enumerate(text.layers):
        handles.append(layer.register_forward_pre_hook(entering(f"into {i}"), with_kwargs=True))
    handles.append(text.norm.register_forward_pre_hook(entering("pre_norm"), with_kwargs=True))
    handles.append(text.norm.register_forward_hook(leaving))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def assert_rows(item: dict[str, Any], seen: dict[str, Tensor]) -> None:
    """The rows of a sample captured with `settings` are those of a plain forward, bit for bit."""
    for slot, name in enumerate(("into 1", "into 2", "pre_norm")):
        assert torch.equal(item["aux_hidden_states"][:, slot], seen[name][0]), name
    assert torch.equal(item["pre_norm"], seen["pre_norm"][0])
    assert torch.equal(item["post_norm"], seen["post_norm"][0])
