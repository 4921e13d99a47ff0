"""Tiny image-text models with their processors, as folders, and pictures to show them.

Processors are transformers' own where that works without torchvision. Those of Qwen3-VL and Kimi-K2.5 also hold a video
processor, which does not: their classes are taken without it, as code that comes with the folder. Kimi's image processor is
written here, as the real one needs torchvision. Nothing is downloaded.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn
from transformers import (
    AutoTokenizer,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Qwen2VLImageProcessorPil,
)

from support import architectures
from support.templates import byte_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|open|>", "<|close|>", "<|image|>", "<|video|>", "<|soft|>")
IMAGE, SOFT = 4, 6
VOCAB = 272

PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FRAMED = PARTS.replace("IMAGE", "{{ '<|open|><|image|><|close|>' }}")
BARE = PARTS.replace("IMAGE", "{{ '<|image|>' }}")


def picture(folder: Path, name: str, width: int, height: int, *, seed: int = 0) -> Path:
    """A PNG of noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(folder / name)
    return folder / name


def tokenizer(folder: Path, template: str, **roles: str) -> Any:
    byte_tokenizer(folder, template, special=SPECIAL)
    made = (
        AutoTokenizer.from_pretrained(folder, extra_special_tokens=roles)
        if roles
        else AutoTokenizer.from_pretrained(folder)
    )
    made.save_pretrained(folder)
    return made


def remote_processor(folder: Path, source: str, image_processor: dict[str, Any], template: str) -> None:
    """Code that comes with the folder: `ImagesOnly` in `source` is its processor."""
    (folder / "processing_images_only.py").write_text(textwrap.dedent(source))
    auto = {"AutoProcessor": "processing_images_only.ImagesOnly"}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "ImagesOnly", "auto_map": auto}))
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (folder / "chat_template.jinja").write_text(template)


QWEN3_VL = """
    from transformers import Qwen3VLProcessor

    class ImagesOnly(Qwen3VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            self.image_token, self.video_token = "<|image|>", "<|video|>"
            super(Qwen3VLProcessor, self).__init__(image_processor, tokenizer, chat_template=chat_template)
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
"""


def qwen3_vl(folder: Path) -> nn.Module:
    """A Qwen3-VL of 4 layers whose vision features join the first 2 of them."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    sizes = {"num_position_embeddings": 64, "spatial_merge_size": 2, "temporal_patch_size": 2}
    model = architectures.build(
        "qwen3_vl", image_token_id=IMAGE, video_token_id=5, vision_start_token_id=2, vision_end_token_id=3,
        text_config={"vocab_size": VOCAB, "rope_parameters": rope},
        vision_config={"deepstack_visual_indexes": [0, 1], **sizes},
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer(folder, FRAMED)
    part = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    remote_processor(folder, QWEN3_VL, part.to_dict(), FRAMED)
    return model


def gemma3(folder: Path) -> nn.Module:
    """A Gemma-3 of 4 layers: 4 rows an image, in a frame of its own, that see each other in both directions."""
    model = architectures.build(
        "gemma3", mm_tokens_per_image=4, image_token_id=SOFT, boi_token_id=IMAGE, eoi_token_id=3,
        image_token_index=SOFT, boi_token_index=IMAGE, eoi_token_index=3, text_config={"vocab_size": VOCAB},
    )  # fmt: skip
    model.save_pretrained(folder)
    made = tokenizer(folder, BARE, image_token="<|soft|>", boi_token="<|image|>", eoi_token="<|close|>")
    part = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    Gemma3Processor(part, made, chat_template=BARE, image_seq_length=4).save_pretrained(folder)
    return model


PATCHES = """
    import numpy as np
    import torch
    from transformers import BatchFeature
    from transformers.image_processing_base import ImageProcessingMixin

    class Patches(ImageProcessingMixin):
        model_input_names = ["pixel_values"]
        merge_size = 2

        def __init__(self, grid="image_grid_thw", **kwargs):
            super().__init__(**kwargs)
            self.grid = grid

        def __call__(self, images, return_tensors=None, **kwargs):
            pictures = [p for nested in images for p in (nested if isinstance(nested, list) else [nested])]
            made = [self.patches(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1) for picture in pictures]
            grids = torch.tensor([grid for _, grid in made])
            return BatchFeature({"pixel_values": torch.cat([patches for patches, _ in made]), self.grid: grids})

        def patches(self, picture):
            _, height, width = picture.shape
            picture = torch.nn.functional.pad(picture, (0, -width % 8, 0, -height % 8))
            h, w = picture.shape[1] // 4, picture.shape[2] // 4
            return picture.reshape(3, h, 4, w, 4).permute(1, 3, 0, 2, 4).reshape(h * w, 3, 4, 4), [1, h, w]
"""

KIMI_K25 = (
    PATCHES
    + """
    from transformers import Kimi_K25Processor

    class ImagesOnly(Kimi_K25Processor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            self.image_token, self.video_token = "<|image|>", "<|video|>"
            super(Kimi_K25Processor, self).__init__(image_processor, tokenizer, chat_template=chat_template)
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
"""
)

# As the code that came with Kimi-K2.5's checkpoints: pictures are media, and each keeps one placeholder.
OWN_KIMI = (
    PATCHES
    + """
    from transformers import ProcessorMixin

    class ImagesOnly(ProcessorMixin):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

        def __call__(self, messages=None, medias=None, text=None, return_tensors="pt", **kwargs):
            made = self.image_processor([media["image"] for media in medias])
            return BatchFeature({**self.tokenizer(text, return_tensors=return_tensors), **made})
"""
)

# Features stand in the place of placeholders; rows that end up shorter are moved right, unless one ends in a pad.
OWN_KIMI_MODEL = """
    import torch
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class OwnKimiConfig(Kimi_K25Config):
        media_placeholder_token_id: int = 4

    class OwnKimi(Kimi_K25ForConditionalGeneration):
        config_class = OwnKimiConfig

        def forward(self, input_ids=None, pixel_values=None, grid_thws=None, attention_mask=None, use_cache=None, **kwargs):
            embeds, positions = self.get_input_embeddings()(input_ids), None
            if pixel_values is not None and input_ids.shape[1] != 1:
                features = self.model.get_image_features(pixel_values, grid_thws, return_dict=True).pooler_output
                embeds, attention_mask, positions = self.merged(list(features), embeds, input_ids, attention_mask)
            output = self.model.language_model(
                inputs_embeds=embeds, attention_mask=attention_mask, position_ids=positions, use_cache=use_cache
            )
            return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state))

        def merged(self, features, embeds, input_ids, attention_mask):
            rows, kept = [], []
            for ids, row, mask in zip(input_ids, embeds, attention_mask):
                parts, real = [], []
                for token, embed, one in zip(ids.tolist(), row, mask):
                    part = features.pop(0) if token == self.config.media_placeholder_token_id else embed[None]
                    parts.append(part)
                    real += [one.item()] * len(part)
                rows.append(torch.cat(parts))
                kept.append(torch.tensor(real))
            longest = max(map(len, rows))
            left = not (input_ids[:, -1] == self.config.pad_token_id).any()
            space = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in rows]
            made = torch.stack([torch.nn.functional.pad(row, (0, 0, *one)) for row, one in zip(rows, space)])
            mask = torch.stack([torch.nn.functional.pad(row, one) for row, one in zip(kept, space)])
            return made, mask, (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
"""


def kimi_k25(folder: Path) -> nn.Module:
    """transformers' Kimi-K2.5, whose processor repeats placeholders."""
    vision = {"merge_kernel_size": [2, 2], "pos_emb_height": 8, "pos_emb_width": 8, "patch_size": 4}
    model = architectures.build(
        "kimi_k25", image_token_id=IMAGE, video_token_id=5, projection_hidden_size=32, vision_config=vision,
        text_config={"model_type": "deepseek_v3", "vocab_size": VOCAB},
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer(folder, FRAMED)
    _with_patches(folder, KIMI_K25, "image_grid_thw")
    return model


def own_kimi(folder: Path, architecture: str = "OwnKimi") -> None:
    """A Kimi-K2.5 that puts image features in the place of one placeholder itself: hidden rows outnumber `input_ids`.

    No id is a pad in real rows: 5 stands for one. Where transformers has a class of the architecture, that one is loaded.
    """
    kimi_k25(folder)
    (folder / "modeling_own.py").write_text(textwrap.dedent(OWN_KIMI_MODEL))
    config = json.loads((folder / "config.json").read_text()) | {"media_placeholder_token_id": IMAGE, "pad_token_id": 5}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnKimiConfig", "AutoModelForCausalLM": "modeling_own.OwnKimi"}
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    _with_patches(folder, OWN_KIMI, "grid_thws")


def _with_patches(folder: Path, source: str, grid: str) -> None:
    auto = {"AutoImageProcessor": "processing_images_only.Patches"}
    part = {"image_processor_type": "Patches", "auto_map": auto, "grid": grid}
    remote_processor(folder, source, part, FRAMED)
