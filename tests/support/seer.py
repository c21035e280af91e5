"""A tiny model that reads images, in memory, and prompts with images for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from turned_scheduler import TurnedScheduler

from fleetd.engine.cpu import products
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt, prepare
from fleetd.engine.protocol import IMAGES, ChatPrompt, Generate, Sampling
from fleetd.engine.vision.image_reader import ImageReader
from fleetd.engine.vision.reader_files import read_image_reader


class Seer:
    """The model in a folder, and what it reads images with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.config = load_model(path)
        self.tokenizer = load_tokenizer(path)
        reader = read_image_reader(path, self.config)
        assert reader is not None
        products.to_float32(reader)
        self.reader: ImageReader = reader

    @classmethod
    def on_cpu(cls, write: Callable[[Path], Path], folder: Path) -> Self:
        """What ``write`` puts into a new folder, written and loaded on the CPU, whatever the default is."""
        before = mx.default_device()
        mx.set_default_device(mx.cpu)
        try:
            return cls(write(folder))
        finally:
            mx.set_default_device(before)

    def prepared(
        self,
        name: str,
        messages: list[dict[str, Any]],
        cache_marks: Sequence[tuple[int, int]] = (),
        image_seen: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> PreparedPrompt:
        fields = {"max_tokens": 8} | fields
        prompt = ChatPrompt(messages, cache_marks=list(cache_marks))
        request = Generate(name, prompt, Sampling(temperature=0.0), **fields)
        vocab = int(self.config["text_config"]["vocab_size"])
        return prepare(
            request,
            self.tokenizer,
            vocab,
            images=self.reader,
            model="seer",
            borders=True,
            image_seen=image_seen,
        )

    def scheduler(self, **options: Any) -> TurnedScheduler:
        return TurnedScheduler(self.model, self.tokenizer, **options)


def asked(*files: bytes, text: str = "What is this?") -> list[dict[str, Any]]:
    """A user's message with images before its text."""
    return [{"role": "user", "content": text, IMAGES: [(0, file) for file in files]}]
