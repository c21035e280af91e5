"""Pixtral's image encoder, and what Mistral 3 puts between it and the text model.

    image ─► patches of 14 x 14 ─► transformer, positions in two dimensions ─► every 2 x 2 of them merged
          ─► as wide as the text model's hidden states: the rows of [IMG] tokens

As ``PixtralVisionModel`` and ``Mistral3MultiModalProjector`` of transformers have it (Apache-2.0), and with
their names for the weights. In shapes L is the number of patches, W the encoder's width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from fleetd.engine.vision.encoder_parts import PassSizes, activation, attended, by_heads
from fleetd.engine.vision.image_reader import ImagePatches, ImageReader, ImageSettings
from fleetd.text.decoding import from_plain

# CLIP's means and deviations, and bicubic interpolation: what the makers use where they say nothing else.
_USUAL = ImageSettings(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), resample=3, longest=1540
)


class PixtralConfig(msgspec.Struct, frozen=True):
    """``vision_config`` of a model's config; the defaults are transformers'."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 1024
    patch_size: int = 16
    hidden_act: str = "gelu"
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None

    @property
    def base(self) -> float:
        """The base of the rotary embedding; newer configs have it among its parameters."""
        found = (self.rope_parameters or {}).get("rope_theta", self.rope_theta)
        return float(found or 10_000.0)


class _PatchAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def reading(self, x: mx.array, turns: tuple[mx.array, mx.array]) -> Generator[None, None, mx.array]:
        q, k, v = (by_heads(each(x), self.heads) for each in (self.q_proj, self.k_proj, self.v_proj))
        seen = yield from attended(_turned(q, turns), _turned(k, turns), v)
        return self.o_proj(seen)  # type: ignore[no-any-return]


def _turned(rows: mx.array, turns: tuple[mx.array, mx.array]) -> mx.array:
    """Rows (1, heads, L, head) with their positions in them, by halves as GPT-NeoX has it."""
    cos, sin = turns
    half = rows.shape[-1] // 2
    swapped = mx.concatenate([-rows[..., half:], rows[..., :half]], axis=-1)
    return rows * cos + swapped * sin


class _PatchFeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.act = activation(config.hidden_act)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _PixtralLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.attention = _PatchAttention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.feed_forward = _PatchFeedForward(config)

    def reading(self, x: mx.array, turns: tuple[mx.array, mx.array]) -> Generator[None, None, mx.array]:
        x = x + (yield from self.attention.reading(self.attention_norm(x), turns))
        return x + self.feed_forward(self.ffn_norm(x))


class _PixtralLayers(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.layers = [_PixtralLayer(config) for _ in range(config.num_hidden_layers)]


class PixtralEncoder(nn.Module):  # type: ignore[misc]
    """One image's patches, each of which sees all others."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.config = config
        self.patch_conv = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=patch, stride=patch, bias=False
        )
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.transformer = _PixtralLayers(config)

    @property
    def sizes(self) -> PassSizes:
        config = self.config
        return PassSizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.patch_size,
            self.patch_conv.weight.dtype.size,
        )

    def reading(self, pixels: mx.array) -> Generator[None, None, mx.array]:
        """(H, W, 3), both sides whole patches → (H / patch, W / patch, W of the encoder), in steps."""
        found = self.patch_conv(pixels[None].astype(self.patch_conv.weight.dtype))
        _, rows, columns, width = found.shape
        x = self.ln_pre(found.reshape(1, rows * columns, width))
        turns = self._turns(rows, columns, x.dtype)
        del pixels, found
        for layer in self.transformer.layers:
            x = yield from layer.reading(x, turns)
            # What attention takes is not held for all of them, and others have their turns meanwhile.
            mx.eval(x)
            yield
        return x.reshape(rows, columns, width)  # type: ignore[no-any-return]

    def _turns(self, rows: int, columns: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """cos and sin (L, head): even frequencies turn with a patch's row, odd ones with its column."""
        config = self.config
        head = config.head_dim or config.hidden_size // config.num_attention_heads
        frequencies = 1.0 / config.base ** (np.arange(0, head, 2, dtype=np.float32) / head)
        down = np.outer(np.arange(rows, dtype=np.float32), frequencies[::2])
        across = np.outer(np.arange(columns, dtype=np.float32), frequencies[1::2])
        angles = np.concatenate(
            [
                np.repeat(down[:, None], columns, axis=1),
                np.repeat(across[None], rows, axis=0),
            ],
            axis=-1,
        ).reshape(rows * columns, head // 2)
        both = mx.array(np.concatenate([angles, angles], axis=-1).astype(np.float32))
        return mx.cos(both).astype(dtype), mx.sin(both).astype(dtype)


class _PatchMerger(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.merging_layer = nn.Linear(width * side * side, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """(rows, columns, W) → (rows x columns / side², W)."""
        side = self.side
        rows, columns, width = x.shape
        grid = x.reshape(rows // side, side, columns // side, side, width).transpose(0, 2, 4, 1, 3)
        return self.merging_layer(grid.reshape(-1, width * side * side))  # type: ignore[no-any-return]


class Mistral3Projector(nn.Module):  # type: ignore[misc]
    """A projection to the text model's width, of every side x side patches as one."""

    def __init__(
        self, width: int, text_width: int, *, side: int, eps: float, bias: bool, hidden_act: str
    ) -> None:
        super().__init__()
        self.act = activation(hidden_act)
        self.norm = nn.RMSNorm(width, eps=eps)
        self.patch_merger = _PatchMerger(width, side)
        self.linear_1 = nn.Linear(width, text_width, bias=bias)
        self.linear_2 = nn.Linear(text_width, text_width, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """(rows, columns, W) → (rows x columns / side², D of the text model)."""
        return self.linear_2(self.act(self.linear_1(self.patch_merger(self.norm(x)))))  # type: ignore[no-any-return]


class Mistral3Reader(ImageReader):
    """Mistral 3's: an image keeps its ratio of sides, and a row of it ends with a token of its own."""

    placeholder = "[IMG]"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision = from_plain(config["vision_config"], PixtralConfig)
        text = config["text_config"]
        self.settings = ImageSettings.in_folder(folder, _USUAL)
        self.side = int(config.get("spatial_merge_size", 2))
        self.patch = vision.patch_size
        self.row_token = int(config.get("image_token_index", config.get("image_token_id", 10)))
        self.vision_tower = PixtralEncoder(vision)
        self.text_width = int(text["hidden_size"])
        self.multi_modal_projector = Mistral3Projector(
            vision.hidden_size,
            self.text_width,
            side=self.side,
            eps=float(text.get("rms_norm_eps", 1e-5)),
            bias=bool(config.get("multimodal_projector_bias", False)),
            hidden_act=str(config.get("projector_hidden_act", "gelu")),
        )

    @property
    def sizes(self) -> PassSizes:
        return self.vision_tower.sizes

    def patches(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> ImagePatches:
        multiple = self.patch * self.side
        height, width = fitted(image.shape[0], image.shape[1], self.settings.longest, multiple)
        rows, columns = height // multiple, width // multiple
        pixels = self.settings.resized(image, height, width)
        return ImagePatches(pixels, rows * columns, shown(rows, columns))

    def reading(self, patches: ImagePatches) -> Generator[None, None, mx.array]:
        seen = yield from self.vision_tower.reading(self.settings.normalised(patches.pixels))
        found: mx.array = self.multi_modal_projector(seen)
        return found


def fitted(height: int, width: int, longest: int, multiple: int) -> tuple[int, int]:
    """The size that an image is read at: at most ``longest`` a side, both sides whole ``multiple``s."""
    ratio = max(height / longest, width / longest, 1.0)
    sides = (max(1, math.floor(side / ratio)) for side in (height, width))
    height, width = ((side - 1) // multiple + 1 for side in sides)
    return height * multiple, width * multiple


def shown(rows: int, columns: int) -> str:
    """What stands for an image of so many merged patches in a prompt's text."""
    return "[IMG_BREAK]".join(itertools.repeat("[IMG]" * columns, rows)) + "[IMG_END]"
