"""Which modules are the decoder layers."""

import pytest
import torch
from torch import nn

from hiddentap.models.decoder import DecoderNotFoundError, find_decoder
from support import neutral_names, tiny

PATHS = {
    "llama": "model.layers",
    "qwen3": "model.layers",
    "gpt2": "transformer.h",
    "gemma2": "model.layers",
    "gpt_oss": "model.layers",
    "deepseek_v3": "model.layers",
    "kimi_linear": "model.layers",
}


@pytest.mark.parametrize("family", PATHS)
def test_the_layers_are_found_in_each_family(family: str) -> None:
    model = tiny.build(family)
    decoder = find_decoder(model)
    assert (decoder.layers_path, decoder.n, decoder.vocab_rows) == (PATHS[family], 4, 96)
    assert decoder.layers[2] is model.get_submodule(f"{PATHS[family]}.2")
    assert decoder.widths == {32}


def test_an_image_text_model_gives_its_language_layers_not_its_vision_tower() -> None:
    decoder = find_decoder(tiny.build_kimi_k25())
    assert (decoder.layers_path, decoder.n) == ("model.language_model.layers", 4)


def test_compiled_layers_are_recognised_inside_their_wrapper() -> None:
    model = tiny.build("llama")
    for i in range(4):
        model.model.layers[i] = torch.compile(model.model.layers[i])
    assert find_decoder(model).n == 4


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2))
    with pytest.raises(DecoderNotFoundError, match="encoder-decoder"):
        find_decoder(model)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(DecoderNotFoundError, match=r"DataParallel .* Pass model\.module"):
        find_decoder(nn.DataParallel(tiny.build("llama")))


def test_a_model_without_a_layer_list_is_refused_with_what_was_found() -> None:
    with pytest.raises(
        DecoderNotFoundError, match=r"cannot tell which modules of Sequential are its decoder layers.*none"
    ):
        find_decoder(nn.Sequential(nn.Linear(4, 4)))


def test_neutral_blocks_of_a_skeleton_without_weights_are_found_too() -> None:
    with torch.device("meta"):
        model = neutral_names.Neutral()
    decoder = find_decoder(model)
    assert (decoder.layers_path, decoder.n, decoder.found_by) == ("parts", 5, "probing")


def test_a_model_that_marks_its_layers_is_not_run_to_find_them() -> None:
    model = tiny.build("llama")
    model.forward = None  # calling it would raise
    assert find_decoder(model).found_by == "structure"


def test_two_stacks_of_blocks_that_feed_each_other_are_not_chosen_between() -> None:
    class TwoStacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(96, 32)
            self.low, self.high = (nn.ModuleList(neutral_names.Unit(32) for _ in range(3)) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            for unit in (*self.low, *self.high):
                (x, _) = unit(x)
            return x

    with pytest.raises(DecoderNotFoundError, match=r"found low \(3 x Unit\), high \(3 x Unit\)"):
        find_decoder(TwoStacks())
