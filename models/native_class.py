"""Published configs that transformers' own classes compute, whatever code comes with the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

# Published model types that are another one of transformers' under a name of their own, as serving engines load them too.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def native_config(name: str, revision: str | None) -> Any | None:
    """Return the config of a published model by transformers' own class, without code of the checkpoint.

    None where transformers has no class of the architecture that the config names, or where its loader finds the class itself.
    Such a model keeps its published type as `published_as`.

    Raises:
        OSError: no config there.
    """
    fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    published = fields.get("model_type")
    model_type = _SAME_AS.get(published, published)
    if model_type == published and not fields.get("auto_map"):
        return None
    if model_type not in CONFIG_MAPPING or not _names_native_class(model_type, fields.get("architectures")):
        return None
    renamed = {"published_as": published} if model_type != published else {}
    config = CONFIG_MAPPING[model_type].from_dict({**fields, **renamed, "model_type": model_type})
    config._name_or_path = name
    return config


def has_native_class(config: Any) -> bool:
    """Return whether transformers has a class of the architecture that a config names, for the config's own type."""
    own = type(config).__module__.startswith("transformers.")
    return own and _names_native_class(config.model_type, getattr(config, "architectures", None))


def has_remote_class(config: Any) -> bool:
    """Return whether code for the model comes with the checkpoint."""
    code = getattr(config, "auto_map", None)
    return isinstance(code, Mapping) and any(str(name).startswith("AutoModelFor") for name in code)


def _names_native_class(model_type: str, architectures: Any) -> bool:
    named = _plain(architectures[0]) if architectures else None
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        found = names.get(model_type)
        if found is not None and named in {_plain(one) for one in ((found,) if isinstance(found, str) else found)}:
            return True
    return False


def _plain(class_name: str) -> str:
    """Drop spelling that differs between names of one class: only transformers writes Kimi_K25ForConditionalGeneration."""
    return class_name.replace("_", "").lower()
