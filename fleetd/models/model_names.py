"""Names that stand for a model of this machine: "default", and those that agents insist on. Pure."""

from __future__ import annotations

import re

import msgspec

from fleetd.models.names import is_path

# Claude Code and Codex ask for their vendors' models whatever the address. gpt-oss is a model of its own.
_VENDOR = re.compile(r"claude-|gpt-\d|codex-|o\d(-|$)")
_SMALL = re.compile(r"haiku|-mini\b|-nano\b")
# Where Ollama's clients name models of Hugging Face.
_HUB_HOSTS = ("hf.co/", "huggingface.co/")
# The model that the settings name.
DEFAULT = "default"
# Claude Code lists only models whose names begin so.
CLAUDE_PREFIX = "claude-fleet-"


def untagged(name: str) -> str:
    """A name as Ollama's clients write it, in the form of names here: ``qwen3:4b`` is ``qwen3-4b``.

    The tag ``latest`` says nothing. No name has a colon, but paths may. What is no path becomes none.
    """
    if is_path(name):
        return name
    for host in _HUB_HOSTS:
        if is_path(rest := name.removeprefix(host)):
            break
        name = rest
    base, colon, tag = name.partition(":")
    if not colon or not base or not tag or tag == "latest":
        return base if tag == "latest" else name
    return f"{base}-{tag}"


def stands_for_others(name: str) -> bool:
    """True for a name that never reaches a model of this name."""
    return name == DEFAULT or untagged(name) != name


class ModelNames(msgspec.Struct, frozen=True):
    """The models that the settings name; "" stands for the large one, and there for the default one."""

    default: str
    _large: str = ""
    _small: str = ""

    @property
    def large(self) -> str:
        return self._large or self.default

    @property
    def small(self) -> str:
        return self._small or self.large

    def named(self, asked: str | None) -> str:
        """The name that a request means: the default model's if it names none."""
        return self.default if asked in (None, "", DEFAULT) else asked

    def answered(self, asked: str | None) -> str:
        """The name that an answer carries: the one that was asked for, or the default model's."""
        return asked or self.default

    def here(self, asked: str | None) -> str:
        """The same as a name that models are found by, and what an alias stands for."""
        name = untagged(self.named(asked))
        return self.alias(name) or name

    def alias(self, name: str) -> str | None:
        """What a name stands for if no model is called so; None if it is no alias."""
        if name.startswith(CLAUDE_PREFIX):
            real = name.removeprefix(CLAUDE_PREFIX)
            return None if is_path(real) else real or self.default
        if _VENDOR.match(name) is None:
            return None
        return self.small if _SMALL.search(name) else self.large
