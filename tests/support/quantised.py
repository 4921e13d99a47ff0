"""Tiny models whose linear layers bitsandbytes keeps in 8 or 4 bits, on the CPU."""

from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from support.model_folder import llama_folder
from support.templates import CHATML, byte_tokenizer


def quantised_llama(folder: Path, bits: int) -> nn.Module:
    """Four layers, quantised while they are loaded; saved in `folder`/quantised with a tokenizer.

    Skips where bitsandbytes is not installed: it is in tests/requirements-peers.txt, not among the package's extras.
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; see tests/requirements-peers.txt")
    plain = llama_folder(folder / "plain", hidden_size=64, intermediate_size=128)
    settings = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings, device_map={"": "cpu"}).eval()
    model.save_pretrained(folder / "quantised")
    byte_tokenizer(folder / "quantised", CHATML)
    return model
