"""Model folders of other libraries, told by their files, with the way out."""

from __future__ import annotations

from pathlib import Path

# What lies in folders without a config.json, and the way out.
_WITHOUT_CONFIG = {
    "*.gguf": "a GGUF file. Take the release in safetensors that it was converted from",
    "adapter_config.json": "an adapter without its base model. Merge it into the base model, or put both into one folder",
    "params.json": "weights in their maker's own layout. Take the release for transformers",
    "model_index.json": "a diffusion pipeline, which is no causal language model",
}


def without_config(folder: Path) -> str | None:
    """Return the form of a model folder that has no config.json, with the way out; None for others."""
    if folder.is_file() and folder.suffix == ".gguf":
        return f"it is {_WITHOUT_CONFIG['*.gguf']}"
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    for pattern, form in _WITHOUT_CONFIG.items():
        if next(folder.glob(pattern), None) is not None:
            return f"{folder} has no config.json; it holds {form}"
    return None
