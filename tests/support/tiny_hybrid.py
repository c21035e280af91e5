"""A small model of Qwen 3 Next's kind as a folder: rows, running states, and a token for each character."""

from __future__ import annotations

import json
from pathlib import Path

import chain_model
import tiny_architectures

NAME = "tiny-hybrid"


def build(folder: Path) -> Path:
    """Write the model into ``folder`` and return it. What it says means nothing."""
    chain_model.build(folder)
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return tiny_architectures.write(folder, "qwen3_next", vocab_size=chain_model.HIDDEN, eos_token_id=eos)
