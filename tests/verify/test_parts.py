"""Parts that lean on a model's modules: the final norm found by values, outputs known by their look, float32 and back."""

import pytest
import torch
from torch import nn

from hiddentap.capture.verify.final_norm import find_final_norm
from hiddentap.capture.verify.float32 import in_float32
from hiddentap.capture.verify.norm_state import has_left
from support import tiny

NORMS = {
    "llama": "model.norm",
    "gpt2": "transformer.ln_f",
    "gemma2": "model.norm",
    "kimi_linear": "model.norm",
    "kimi_k25": "model.language_model.norm",
}


@pytest.mark.parametrize(("family", "path"), NORMS.items())
def test_the_final_norm_is_found_by_what_passes_through_it(family: str, path: str) -> None:
    model = tiny.build_kimi_k25() if family == "kimi_k25" else tiny.build(family)
    with torch.no_grad():
        found = find_final_norm(model, lambda: model(tiny.token_ids(1, 6), output_hidden_states=True, use_cache=False))
    assert found is not None
    assert found[0] == path
    assert found[1] is model.get_submodule(path)
    assert not model.get_submodule(path)._forward_hooks


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_a_norm_are_known_by_their_look(family: str, dtype: torch.dtype) -> None:
    norm = tiny.build(family, dtype=dtype).get_submodule(NORMS[family])
    rows = torch.randn(20, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 9, 20)[:, None]
    rows = rows.to(dtype)
    assert has_left(norm, rows) is False
    assert has_left(norm, norm(rows)) is True
    assert has_left(norm, rows[:3]) is None


def test_a_module_that_gives_no_rows_of_one_length_says_nothing() -> None:
    assert has_left(nn.Identity(), torch.linspace(1, 9, 80).reshape(20, 4)) is None


def test_weights_are_float32_inside_and_as_they_were_afterwards() -> None:
    model = tiny.build_llama(tie_word_embeddings=True).bfloat16()
    model.model.norm.float()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with in_float32(model):
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert model.lm_head.weight is model.model.embed_tokens.weight
    after = model.state_dict()
    assert all(
        after[name].dtype == weight.dtype and torch.equal(after[name], weight) for name, weight in before.items()
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
