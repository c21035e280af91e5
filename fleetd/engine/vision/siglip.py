"""SigLIP's image encoder, and what Gemma 3 puts between it and the text model.

    image of 896 x 896 ─► 64 x 64 patches of 14 x 14 ─► transformer, learned positions ─► means of every 4 x 4
          ─► as wide as the text model's hidden states: the rows of 256 <image_soft_token>

As ``SiglipVisionModel`` and ``Gemma3MultiModalProjector`` of transformers have it (Apache-2.0), and with
their names for the weights. In shapes L is the number of patches, W the encoder's width.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.models.gemma3_text import RMSNorm

from fleetd import limits
from fleetd.engine.vision.encoder_parts import PassSizes, activation, attended, by_heads
from fleetd.engine.vision.image_reader import ImagePatches, ImageReader, ImageSettings
from fleetd.models.json_files import read_json
from fleetd.text.decoding import from_plain

# Bilinear.
_USUAL = ImageSettings((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), resample=2)


class SiglipConfig(msgspec.Struct, frozen=True):
    """``vision_config`` of a model's config; the defaults are transformers', and Gemma 3's sizes."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 896
    patch_size: int = 14
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def side(self) -> int:
        """Patches along each side of an image."""
        return self.image_size // self.patch_size


class _SiglipEmbeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=patch, stride=patch
        )
        self.position_embedding = nn.Embedding(config.side**2, config.hidden_size)

    def __call__(self, pixels: mx.array) -> mx.array:
        found = self.patch_embedding(pixels[None].astype(self.patch_embedding.weight.dtype))
        count = found.shape[1] * found.shape[2]
        return found.reshape(1, count, -1) + self.position_embedding(mx.arange(count))  # type: ignore[no-any-return]


class _SiglipAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def reading(self, x: mx.array) -> Generator[None, None, mx.array]:
        q, k, v = (by_heads(each(x), self.heads) for each in (self.q_proj, self.k_proj, self.v_proj))
        seen = yield from attended(q, k, v)
        return self.out_proj(seen)  # type: ignore[no-any-return]


class _SiglipFeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.act = activation(config.hidden_act)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class _SiglipLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _SiglipAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = _SiglipFeedForward(config)

    def reading(self, x: mx.array) -> Generator[None, None, mx.array]:
        x = x + (yield from self.self_attn.reading(self.layer_norm1(x)))
        return x + self.mlp(self.layer_norm2(x))


class _SiglipLayers(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layers = [_SiglipLayer(config) for _ in range(config.num_hidden_layers)]


class SiglipEncoder(nn.Module):  # type: ignore[misc]
    """One image's patches, each of which sees all others."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _SiglipEmbeddings(config)
        self.encoder = _SiglipLayers(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def sizes(self) -> PassSizes:
        config = self.config
        return PassSizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.patch_size,
            self.embeddings.patch_embedding.weight.dtype.size,
        )

    def reading(self, pixels: mx.array) -> Generator[None, None, mx.array]:
        """(H, W, 3), of the size that the config says → (L, W of the encoder), in steps."""
        x = self.embeddings(pixels)
        del pixels
        for layer in self.encoder.layers:
            x = yield from layer.reading(x)
            # What attention takes is not held for all of them, and others have their turns meanwhile.
            mx.eval(x)
            yield
        return self.post_layernorm(x)[0]  # type: ignore[no-any-return]


class Gemma3Projector(nn.Module):  # type: ignore[misc]
    """A projection to the text model's width, of the means of squares of patches.

    Args:
        side: patches along each side of an image.
        rows: rows that they become.
    """

    def __init__(self, width: int, text_width: int, *, side: int, rows: int, eps: float) -> None:
        super().__init__()
        self.kept = math.isqrt(rows)
        if self.kept**2 != rows or side % self.kept:
            raise ValueError(f"{side} x {side} patches do not become {rows} rows")
        self.mm_input_projection_weight = mx.zeros((width, text_width))
        self.mm_soft_emb_norm = RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array) -> mx.array:
        """(L, W) → (rows, D of the text model)."""
        width, kept = x.shape[-1], self.kept
        each = math.isqrt(x.shape[0]) // kept
        means = x.reshape(kept, each, kept, each, width).mean(axis=(1, 3)).reshape(kept * kept, width)
        return self.mm_soft_emb_norm(means) @ self.mm_input_projection_weight  # type: ignore[no-any-return]


class Gemma3Reader(ImageReader):
    """Gemma 3's: every image has one size and as many rows. In the text model these see each other."""

    both_ways = True

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision = from_plain(config["vision_config"], SiglipConfig)
        self.settings = ImageSettings.in_folder(folder, _USUAL)
        self.size = vision.image_size
        self.rows = int(config.get("mm_tokens_per_image", 256))
        self.row_token = int(config.get("image_token_index", config.get("image_token_id", 262_144)))
        words = _words(folder)
        self.placeholder = words.begin
        self.text = f"\n\n{words.begin}{words.row * self.rows}{words.end}\n\n"
        self.vision_tower = SiglipEncoder(vision)
        self.text_width = int(config["text_config"]["hidden_size"])
        self.multi_modal_projector = Gemma3Projector(
            vision.hidden_size,
            self.text_width,
            side=vision.side,
            rows=self.rows,
            eps=vision.layer_norm_eps,
        )

    @property
    def sizes(self) -> PassSizes:
        return self.vision_tower.sizes

    def patches(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> ImagePatches:
        return ImagePatches(self.settings.resized(image, self.size, self.size), self.rows, self.text)

    def reading(self, patches: ImagePatches) -> Generator[None, None, mx.array]:
        seen = yield from self.vision_tower.reading(self.settings.normalised(patches.pixels))
        found: mx.array = self.multi_modal_projector(seen)
        return found


class _ImageWords(msgspec.Struct, frozen=True):
    """What a tokenizer's config calls the tokens of images."""

    begin: str = msgspec.field(name="boi_token", default="<start_of_image>")
    end: str = msgspec.field(name="eoi_token", default="<end_of_image>")
    row: str = msgspec.field(name="image_token", default="<image_soft_token>")


def _words(folder: Path) -> _ImageWords:
    """Those of a folder. Raises ModelCorrupt."""
    path = folder / "tokenizer_config.json"
    found = read_json(path, limits.MODEL_JSON_BYTES) if path.is_file() else {}
    return from_plain(found, _ImageWords)
