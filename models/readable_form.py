"""Refusals of checkpoints in a form that nothing here reads rightly."""

from __future__ import annotations

from importlib.util import find_spec

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from .published_form import OF_ACTIVATIONS, OF_WEIGHTS, PublishedForm, PublishedFormError

# Methods of transformers that need a package of their own: what to import, what to install.
_PACKAGES = {
    "aqlm": ("aqlm", "aqlm"),
    "auto-round": ("auto_round", "auto-round"),
    "awq": ("gptqmodel", "gptqmodel"),
    "bitsandbytes_4bit": ("bitsandbytes", "bitsandbytes"),
    "bitsandbytes_8bit": ("bitsandbytes", "bitsandbytes"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "eetq": ("eetq", "eetq"),
    "fp8": ("accelerate", "accelerate"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "hqq": ("hqq", "hqq"),
    "mxfp8": ("accelerate", "accelerate"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "quark": ("quark", "amd-quark"),
    "torchao": ("torchao", "torchao"),
    "vptq": ("vptq", "vptq"),
}

OTHER_RELEASE = (
    "Take the unquantized release, or one in a form that transformers reads (compressed-tensors, fp8, mxfp4, "
    "bitsandbytes, gptq, awq); --engine vllm reads some others."
)


def require_readable(form: PublishedForm, name: str) -> None:
    """Refuse a checkpoint whose weights would be taken for plain numbers, or whose quantizer is not there.

    Raises:
        PublishedFormError: naming the form and the way out.
    """
    require_word_of_quantization(form, name)
    if form.method is None:
        return
    if form.method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise PublishedFormError(
            f"{name} is quantized as {_method_in_words(form)}, which transformers does not read: its weights would be taken for "
            f"plain numbers. {OTHER_RELEASE}"
        )
    module, package = _PACKAGES.get(form.method, (None, None))
    if module is not None and not _installed(module):
        raise PublishedFormError(
            f"{name} is quantized as {form.method}, which needs the package {package}: pip install {package}. "
            "Or take the unquantized release."
        )


def require_word_of_quantization(form: PublishedForm, name: str) -> None:
    """Refuse a checkpoint with quantized weights whose config does not say so.

    Raises:
        PublishedFormError: naming the first such tensor.
    """
    if form.method is not None:
        return
    first = next(iter(form.quantized), None)
    if form.model_optimizer is not None:
        raise PublishedFormError(
            f"{name} is in the form of NVIDIA Model-Optimizer ({form.model_optimizer} in hf_quant_config.json), and its "
            f"config.json has no quantization_config that transformers reads. {OTHER_RELEASE}"
        )
    if first is not None:
        raise PublishedFormError(
            f"{name} holds {len(form.quantized)} tensors of quantized weights, such as {first.name} ({first.dtype}, shape "
            f"{list(first.shape)}), and its config.json has no quantization_config: they would be taken for plain numbers. "
            "Restore the quantization_config that it was published with, or take the unquantized release."
        )


def require_consumed(form: PublishedForm, unexpected: list[str], name: str) -> list[str]:
    """Refuse scales and zero points that loading left over; return a note for each kind of scale of activations.

    Raises:
        PublishedFormError: naming the first of them.
    """
    left = sorted(key for key in unexpected if OF_WEIGHTS.search(key))
    if left:
        raise PublishedFormError(
            f"{name}: {len(left)} scales or zero points of quantized weights were used by nothing ({', '.join(left[:3])}), so "
            f"the weights beside them are wrong; the config says {form.method}. {OTHER_RELEASE}"
        )
    kinds = sorted({key.rpartition(".")[2] for key in unexpected if OF_ACTIVATIONS.search(key)})
    return [f"the checkpoint's {kind} of activations is not used: activations are not rounded" for kind in kinds]


def _method_in_words(form: PublishedForm) -> str:
    method = str(form.method)
    if method.startswith("modelopt"):
        algorithm = form.fields.get("quant_algo") or form.model_optimizer
        return f"NVIDIA Model-Optimizer's {algorithm or method} ({method})"
    return {"mlx": "MLX (bits and group_size without a quant_method)", "gguf": "GGUF"}.get(method, repr(method))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
