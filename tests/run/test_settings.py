"""Settings refuse wrong types and values when they are made, before a model is loaded."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiddentap import (
    CaptureSettings,
    ExportSettings,
    HiddentapError,
    ImportSettings,
    ModelSource,
    RayWorkers,
    SamplingParams,
    TextSettings,
    generate_with_capture,
)
from hiddentap.capture.sampling.generation_settings import GenerationSettings
from hiddentap.models.layer_ids import LayerIdError, LayerIdTypeError
from support import tiny


def settings(**given: Any) -> CaptureSettings:
    return CaptureSettings("m", "d.jsonl", "OUT", **({"layer_ids": (1,)} | given))


def test_strings_name_a_model_a_source_and_a_folder() -> None:
    made = CaptureSettings("org/m", "d.jsonl", "OUT", [1, 2])
    assert made.model == ModelSource("org/m")
    assert (made.data, made.out, made.layer_ids) == (("d.jsonl",), Path("OUT"), (1, 2))
    assert CaptureSettings(Path("m"), [Path("a"), "b"], Path("OUT"), (1,)).data == ("a", "b")
    assert made == CaptureSettings(model=ModelSource("org/m"), data=("d.jsonl",), out=Path("OUT"), layer_ids=(1, 2))


WRONG_TYPES = [
    ({"exact": 1}, r"exact must be True or False; got 1 \(int\)"),
    ({"batch_tokens": True}, r"batch_tokens must be an integer or None; got True \(bool\)"),
    ({"batch_tokens": 512.0}, r"batch_tokens must be an integer or None; got 512.0 \(float\)"),
    ({"tp": "2"}, r"tp must be an integer; got '2' \(str\)"),
    ({"text": {"max_length": 9}}, "text must be a TextSettings"),
    ({"text": TextSettings}, "text must be a TextSettings"),
    ({"ray": 4}, "ray must be a RayWorkers"),
    ({"engine": "vllm", "engine_options": ["a=1"]}, "engine_options must be a mapping"),
    ({"head": "yes"}, "head must be True or False"),
    ({"top_logits": np.float32(3)}, "top_logits must be an integer"),
    ({"compile": True}, "compile must be one of auto, on, off"),
    ({"adapter": 3}, "adapter must be a string or None"),
    ({"layer_ids": None, "ids_of": "vllm", "draft_config": 3}, "draft_config must be a path or None"),
]


@pytest.mark.parametrize(("given", "text"), WRONG_TYPES, ids=[str(given) for given, _ in WRONG_TYPES])
def test_a_wrong_type_is_refused_by_the_name_of_its_field(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text) as refused:
        settings(**given)
    assert isinstance(refused.value, HiddentapError)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: CaptureSettings(3, "d", "OUT", (1,)), "model must be a ModelSource; got 3"),
        (lambda: CaptureSettings("m", {"d": 1}, "OUT", (1,)), "data must be a list, each item a string"),
        (lambda: CaptureSettings("m", [1], "OUT", (1,)), "data must be a list, each item a string"),
        (lambda: CaptureSettings("m", "d", None, (1,)), "out must be a path"),
        (lambda: ModelSource(3), "name must be a string"),
        (lambda: ModelSource("m", trust_remote_code="no"), "trust_remote_code must be True or False"),
        (lambda: RayWorkers("2"), "count must be an integer"),
        (lambda: TextSettings(template_args=[("a", 1)]), "template_args must be a mapping"),
        (lambda: TextSettings(max_length="9"), "max_length must be an integer"),
        (lambda: GenerationSettings("m", "d", "OUT", (1,), params={"seed": 1}), "params must be a SamplingParams"),
        (lambda: ExportSettings("a", "deepspec", "b", compress=1), "compress must be True or False"),
        (lambda: ImportSettings("a", "deepspec", "b", n="4"), "n must be an integer or None"),
    ],
)
def test_kin_settings_refuse_wrong_types_too(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        wrong()


WRONG_VALUES = [
    ({"final": "norm"}, "final must be one of none, pre, post, both; got 'norm'"),
    ({"compile": "yes"}, "compile must be one of auto, on, off; got 'yes'"),
    ({"store_dtype": "int8"}, "store_dtype must be one of bfloat16, float16, float32; got 'int8'"),
    ({"on_bad_values": "drop"}, "on_bad_values must be one of reject, raise, keep; got 'drop'"),
    ({"convention": "vllm"}, "unknown layer-id convention 'vllm'; expected one of layer_output, boundary"),
    ({"shard_rows": 0}, "shard_rows must be at least 1; got 0"),
    ({"batch_tokens": -1}, "batch_tokens must be at least 1; got -1"),
    ({"top_logits": -1}, "top_logits must be at least 0; got -1"),
    ({"tp": 2, "engine": "vllm"}, "tp spreads a Hugging Face model"),
    ({"ray": RayWorkers(2)}, r"Ray workers \(.*\) need --engine ray; got 'hf'"),
    ({"exact": True, "compile": "on"}, "compiled layers give other bits than a plain forward"),
]


@pytest.mark.parametrize(("given", "text"), WRONG_VALUES, ids=[str(given) for given, _ in WRONG_VALUES])
def test_a_wrong_value_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loss_on": "user"}, "loss_on must be one of assistant, last, all"),
        ({"think": "drop"}, "think must be one of keep, mask"),
        ({"ids_format": "k2"}, "ids_format must be one of plain, kimi"),
        ({"on_too_long": "cut"}, "on_too_long must be one of truncate, drop"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"workers": -1}, "workers must be at least 0"),
        ({"template_args": {"tokenize": True}}, "found 'tokenize'"),
        ({"loss_on": "all", "ids_format": "kimi"}, "loss_on=all supervises every token"),
    ],
    ids=str,
)
def test_how_rows_become_samples_is_checked_at_once(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TextSettings(**given)


def test_layer_ids_are_refused_with_their_contract_texts_before_a_model_is_there() -> None:
    for wrong in (["1"], [1.0], [True]):
        with pytest.raises(LayerIdTypeError, match="DSPARK target layer_ids must be plain integers"):
            settings(layer_ids=wrong)
    with pytest.raises(LayerIdError, match=r"DSPARK requires at least one target layer for aux hidden capture."):
        settings(layer_ids=[])
    with pytest.raises(LayerIdError, match="must be unique and strictly increasing"):
        settings(layer_ids=[2, 1])
    with pytest.raises(LayerIdError, match="vllm target layer_ids must be unique"):
        settings(layer_ids=[1, 1], ids_of="vllm")
    with pytest.raises(LayerIdError, match=r"DSPARK requires explicit layer_ids for aux hidden capture."):
        CaptureSettings("m", "d", "OUT")
    with pytest.raises(LayerIdError, match=r"DSPARK requires explicit layer_ids for aux hidden capture."):
        GenerationSettings("m", "d", "OUT")


@pytest.mark.parametrize("out", ["s3://bucket/run1", "gs://b/r", "hf://datasets/a/b", Path("s3://bucket/run1")])
def test_an_address_is_no_folder_to_write_to(out: Any) -> None:
    for wrong in (
        lambda: CaptureSettings("m", "d", out, (1,)),
        lambda: GenerationSettings("m", "d", out, (1,)),
        lambda: ExportSettings("a", "deepspec", out),
        lambda: ImportSettings("a", "deepspec", out),
    ):
        with pytest.raises(ValueError, match=r"is an address, and files are written to folders of this machine only"):
            wrong()


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_dtypes_are_taken(short: str, name: str) -> None:
    assert ModelSource("m", dtype=short).dtype == name
    assert settings(store_dtype=short).store_dtype == name


def test_captures_and_generations_have_one_default_of_final() -> None:
    assert settings().final == GenerationSettings("m", "d", "OUT", (1,)).final == "pre"
    model = tiny.build_llama()
    params = SamplingParams(max_new_tokens=2, temperature=0)
    (result,) = generate_with_capture(model, [[1, 2, 3]], params, layer_ids=[1])
    assert set(result.rows) >= {"aux_hidden_states", "pre_norm"}
    (bare,) = generate_with_capture(model, [[1, 2, 3]], params, layer_ids=[])
    assert set(bare.rows) & {"aux_hidden_states", "pre_norm", "post_norm"} == set()


def test_settings_can_be_replaced_and_sent_to_another_process() -> None:
    made = settings(text=TextSettings(limit=3, template_args={"a": 1}), engine="ray", ray=RayWorkers(2, gpus=1))
    assert made.ray.gpus == 1.0
    assert pickle.loads(pickle.dumps(made)) == made
    assert replace(made, exact=True).exact
    with pytest.raises(ValueError, match="exact runs one sample a forward"):
        replace(made, exact=True, batch_tokens=9)


def test_text_rules_reach_the_tokeniser_as_they_are() -> None:
    text = TextSettings(
        max_length=9, on_too_long="drop", loss_on="all", think="mask", strict=True, chat_template="{{x}}"
    )
    options = text.tokenise_options(ModelSource("m", "main"), date="2024-02-03", vocab_rows=7)
    assert (options.tokenizer, options.revision, options.vocab_rows) == ("m", "main", 7)
    assert (options.max_length, options.on_too_long, options.loss_on, options.think) == (9, "drop", "all", "mask")
    assert (options.strict, options.chat_template, options.date.isoformat()) == (True, "{{x}}", "2024-02-03")
