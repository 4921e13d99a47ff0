"""The Kimi family: which generation a model is of, and which readings it leaves to choose from."""

import pytest
from torch import nn

from hiddentap.models.decoder import find_decoder
from hiddentap.models.kimi import kimi_generation
from support import kimi_k3, remote_code, tiny

PREFIX, MIXTURE = "attention_residuals.prefix", "attention_residuals.mixture"


def k3_published_as_kimi_linear() -> nn.Module:
    model = kimi_k3.build()
    model.config.model_type = "kimi_linear"
    return model


@pytest.mark.parametrize(
    ("build", "name", "path", "adapters"),
    [
        (lambda: tiny.build("kimi_linear"), "Kimi Linear", "model.layers", ()),
        (remote_code.build, "Kimi K2", "model.layers", ()),
        (tiny.build_kimi_k25, "Kimi K2.5", "model.language_model.layers", ()),
        (k3_published_as_kimi_linear, "Kimi K3", "model.layers", (PREFIX, MIXTURE)),
    ],
    ids=["linear", "k2 remote code", "k2.5", "k3"],
)
def test_each_generation_has_its_layers_and_readings(build, name: str, path: str, adapters: tuple[str, ...]) -> None:
    decoder = find_decoder(build())
    generation = kimi_generation(decoder.model.config, decoder.layers)
    assert (generation.name, decoder.layers_path, generation.adapters) == (name, path, adapters)


def test_other_models_are_of_no_generation() -> None:
    decoder = find_decoder(tiny.build("deepseek_v3"))
    assert kimi_generation(decoder.model.config, decoder.layers) is None
