"""Loading: a wrong, damaged or half-loaded model is refused, and what config and checkpoint disagree on is told."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiddentap.models.checkpoint import CheckpointError, check_files, config_hash, fingerprint
from hiddentap.models.loading import (
    ModelLoadError,
    ModelSource,
    describe_model,
    load_layer_by_layer,
    load_model,
    model_skeleton,
)
from support import tiny
from support.model_folder import llama_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "model")


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_loaded_model_is_in_evaluation_mode_without_gradients(folder: Path) -> None:
    loaded = load_model(ModelSource(str(folder)))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.weights_dtype, loaded.notes, loaded.revision) == ("float32", (), None)


def test_the_dtype_can_be_chosen_and_is_told(folder: Path) -> None:
    loaded = load_model(ModelSource(str(folder), dtype="bfloat16"))
    assert loaded.weights_dtype == "bfloat16"
    assert loaded.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[1].name}, which is not in .*incomplete"):
        load_model(ModelSource(str(tmp_path)))


def test_a_weight_file_that_does_not_open_is_refused_by_name(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be opened"):
        check_files(folder)


def test_a_missing_weight_is_refused_and_not_left_random(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 weights of LlamaForCausalLM are not in .*: model\.norm\.weight"):
        load_model(ModelSource(str(folder)))


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load_model(ModelSource(str(folder)))
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()


def test_a_head_that_the_config_calls_tied_but_that_is_absent_without_tying_is_missing(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_model(ModelSource(str(folder)))


def test_weights_without_a_place_in_the_model_are_told(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.layers.9.extra.weight": torch.zeros(2)}))
    (note,) = load_model(ModelSource(str(folder))).notes
    assert "1 weights of the checkpoint have no place in LlamaForCausalLM: model.layers.9.extra.weight" in note


def test_a_config_that_promises_more_layers_than_the_checkpoint_has_is_refused(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\."):
        load_model(ModelSource(str(folder)))


def test_a_config_that_promises_another_tying_is_told(folder: Path) -> None:
    model = load_model(ModelSource(str(folder))).model
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    # The checkpoint has a head of its own, with other values than the embeddings, and the config says they are one.
    edit_config(folder, tie_word_embeddings=True)
    (note,) = load_model(ModelSource(str(folder))).notes
    assert "tie_word_embeddings=True" in note


def test_code_that_comes_with_a_model_does_not_run_unasked(folder: Path) -> None:
    edit_config(
        folder,
        model_type="of_its_own",
        auto_map={"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modeling.Own"},
    )
    (folder / "configuration.py").write_text("raise SystemExit('the code ran')\n")
    with pytest.raises(ModelLoadError, match="cannot be loaded as a model"):
        load_model(ModelSource(str(folder)))


def test_a_model_that_is_no_language_model_is_refused_by_its_type(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    ViTModel(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="'vit' model; expected a causal language model"):
        load_model(ModelSource(str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_size": "x"}, "its config.json: .* 'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, r"a value in its config.json is not what its class expects \(ZeroDivisionError"),
        ({"quantization_config": [3]}, r"a value in its config.json is not what its class expects \(AttributeError"),
        ({"model_type": {}}, r"a value in its config.json is not what its class expects \(TypeError"),
        ({"dtype": []}, r"a value in its config.json is not what its class expects \(IndexError"),
        ({"layer_types": 1}, "its config.json.*TypeError"),
        ({"hidden_act": "x"}, r"a value in its config.json is not what its class expects \(KeyError"),
        ({"auto_map": 1.5}, "."),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("load", [load_model, describe_model, load_layer_by_layer])
def test_a_config_field_that_its_class_cannot_use_is_an_error_of_one_line(
    load: Callable[[ModelSource], object], fields: dict[str, object], text: str, folder: Path
) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ModelLoadError, match=text) as caught:
        load(ModelSource(str(folder)))
    assert "\n" not in str(caught.value)


def test_weights_of_other_shapes_than_the_config_says_are_told_as_such(folder: Path) -> None:
    edit_config(folder, intermediate_size=48)
    with pytest.raises(ModelLoadError, match="weights have other shapes than those of the llama model") as caught:
        load_model(ModelSource(str(folder)))
    assert "above report" not in str(caught.value)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "no-such-model-anywhere"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be loaded as a model"):
        load_model(ModelSource(name))


def test_an_unknown_dtype_or_device_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype must be one of"):
        ModelSource(str(folder), dtype="int8")
    with pytest.raises(ModelLoadError, match="unknown device 'abacus'"):
        load_model(ModelSource(str(folder), device="abacus"))


def test_equal_weights_have_equal_fingerprints_and_a_fine_tuned_twin_another(folder: Path, tmp_path: Path) -> None:
    twin = llama_folder(tmp_path / "twin")
    assert fingerprint(folder) == fingerprint(twin)
    edit_weights(twin, lambda weights: weights["model.layers.2.mlp.up_proj.weight"].add_(1e-3))
    assert fingerprint(folder) != fingerprint(twin)


def test_files_beside_the_weights_do_not_change_their_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "training_args.bin").write_bytes(b"x")
    assert fingerprint(folder) == before


def test_the_config_hash_ignores_where_the_model_lies(folder: Path, tmp_path: Path) -> None:
    twin = llama_folder(tmp_path / "twin")
    hashes = [config_hash(model_skeleton(ModelSource(str(place))).config) for place in (folder, twin)]
    assert hashes[0] == hashes[1]
    edit_config(twin, rms_norm_eps=1e-3)
    assert config_hash(model_skeleton(ModelSource(str(twin))).config) != hashes[0]


def test_a_skeleton_has_the_structure_and_no_weights(folder: Path) -> None:
    skeleton = model_skeleton(ModelSource(str(folder)))
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
