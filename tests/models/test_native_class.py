"""A checkpoint whose architecture transformers has is computed by transformers' class, whatever code comes with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from hiddentap.models.decoder import find_decoder
from hiddentap.models.head import load_head, save_head
from hiddentap.models.kimi import kimi_generation
from hiddentap.models.loading import ModelSource, load_model, model_skeleton
from support import tiny
from support.model_folder import llama_folder
from support.published import Form, Published, float8_blocks, fp8_config, publish

CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}


def as_published(model_type: str) -> Any:
    def edit(config: dict[str, Any]) -> None:
        config |= {"model_type": model_type, "auto_map": CODE, "architectures": ["DeepseekV3ForCausalLM"]}

    return edit


def published(folder: Path, model_type: str) -> Published:
    """A tiny DeepSeek-V3 in FP8 under that type, with code beside it that fails when it runs."""
    model = tiny.build("deepseek_v3", dtype=torch.bfloat16)
    form = Form(float8_blocks((24, 16)), fp8_config((24, 16)))
    found = publish(folder, model, form, edit=as_published(model_type))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (found.folder / name).write_text("raise SystemExit('the code ran')\n")
    return found


@pytest.mark.parametrize("trust", [False, True], ids=["without the flag", "with --trust-remote-code"])
@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"], ids=["Kimi K2", "Moonlight"])
def test_it_loads_without_its_code_and_exactly(model_type: str, trust: bool, tmp_path: Path) -> None:
    found = published(tmp_path, model_type)
    loaded = load_model(ModelSource(str(found.folder), device="cpu", trust_remote_code=trust))
    plain = AutoModelForCausalLM.from_pretrained(found.plain).eval()
    ids = tiny.token_ids(1, 12)
    with torch.no_grad():
        states, expected = (m(ids, output_hidden_states=True).hidden_states for m in (loaded.model, plain))
    assert isinstance(loaded.model, DeepseekV3ForCausalLM)
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))
    assert loaded.notes == (
        "transformers' own DeepseekV3ForCausalLM computes it, not the code that comes with the checkpoint",
    )


def test_the_generation_of_a_kimi_k2_is_known_from_its_published_type(tmp_path: Path) -> None:
    decoder = find_decoder(model_skeleton(ModelSource(str(published(tmp_path, "kimi_k2").folder))))
    generation = kimi_generation(decoder.model.config, decoder.layers)
    assert generation is not None
    assert generation.name == "Kimi K2"


def test_its_head_is_read_without_the_code(tmp_path: Path) -> None:
    loaded = load_model(ModelSource(str(published(tmp_path, "kimi_k2").folder), device="cpu", trust_remote_code=True))
    save_head(tmp_path / "head", loaded.model, "model.norm", trust_remote_code=True)
    head = load_head(tmp_path / "head")
    rows = torch.randn(5, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    assert head.norm is not None
    assert torch.equal(head.norm(rows), loaded.model.model.norm(rows))
    assert "auto_map" not in json.loads((tmp_path / "head/config.json").read_text())


CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "of_its_own"
"""

MODELING = """
import torch
from transformers import LlamaForCausalLM
from .configuration import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    marked = True

    def __init__(self, config):
        super().__init__(config)
{buffers}
        self.post_init()
"""


def with_code(folder: Path, buffers: str = "        pass", **fields: object) -> Path:
    """A tiny Llama whose class comes with it."""
    llama_folder(folder)
    (folder / "configuration.py").write_text(CONFIGURATION)
    (folder / "modeling.py").write_text(MODELING.format(buffers=buffers))
    own = {
        "model_type": "of_its_own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "configuration.OwnConfig", "AutoModelForCausalLM": "modeling.OwnForCausalLM"},
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | own | fields))
    return folder


def load_with_code(folder: Path) -> nn.Module:
    return load_model(ModelSource(str(folder), device="cpu", trust_remote_code=True)).model


def test_a_class_that_transformers_has_not_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    assert load_with_code(with_code(tmp_path / "own_class")).marked


def test_a_changed_class_under_a_known_type_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling.OwnForCausalLM"}
    folder = with_code(tmp_path / "own_class_known_type", model_type="llama", auto_map=code)
    assert load_with_code(folder).marked


@pytest.fixture
def used_memory() -> None:
    """Memory that was freed with values in it, which later tensors may get."""
    for size in (4, 8, 16, 64):
        _ = [torch.full((size,), 1e4) for _ in range(64)]


FREQUENCIES = """
        self.model.register_buffer("own_scale", 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)), persistent=False)
        self.model.register_buffer("own_mask", torch.ones(4, 4).tril().bool(), persistent=False)
"""


@pytest.mark.usefixtures("used_memory")
def test_buffers_that_no_file_holds_are_what_the_code_builds(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "own_buffers", FREQUENCIES)
    for _ in range(2):
        model = load_with_code(folder)
        assert model.model.own_scale.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
        assert torch.equal(model.model.own_mask, torch.ones(4, 4).tril().bool())
        assert model.model.rotary_emb.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize(
    "made",
    ["torch.empty(4)", "torch.empty(4, dtype=torch.long)", "torch.randn(4)"],
    ids=["unset", "unset ids", "random"],
)
def test_buffers_that_differ_each_time_are_refused(made: str, tmp_path: Path) -> None:
    from hiddentap.models.remote_buffers import RemoteBufferError

    name = "unsure_" + "".join(c for c in made if c.isalpha())
    folder = with_code(tmp_path / name, f"        self.register_buffer('own', {made}, persistent=False)")
    with pytest.raises(RemoteBufferError, match=r"OwnForCausalLM .* 1 of its buffers .* each time it is built \(own\)"):
        load_with_code(folder)


def test_building_buffers_leaves_random_numbers_and_the_default_dtype_alone(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "own_random", FREQUENCIES)
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    load_with_code(folder)
    assert torch.equal(torch.randn(4), expected)
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
