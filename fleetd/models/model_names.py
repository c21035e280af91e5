"""Names that stand for a model of this machine: "default", and those that agents insist on. Pure."""

from __future__ import annotations

import re

import msgspec

from fleetd.models.names import is_path

# Claude Code and Codex ask for their vendors' models whatever the address. gpt-oss is a model of its own.
_VENDOR = re.compile(r"claude-|gpt-\d|codex-|o\d(-|$)")
_SMALL = re.compile(r"haiku|-mini\b|-nano\b")
# How names of Hugging Face's models begin in Ollama's clients.
_HUB_HOSTS = ("hf.co/", "huggingface.co/")
# The name that means the default model of the settings.
DEFAULT = "default"
# Claude Code lists only models whose names begin with "claude".
CLAUDE_PREFIX = "claude-fleet-"


def untagged(name: str) -> str:
    """A name as Ollama's clients write it, in the form of names here: ``qwen3:4b`` is ``qwen3-4b``.

    The tag ``latest`` is left out. A path, which may have a colon, is returned as it is; and no other name
    becomes a path.
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
    """True for a name that requests never get a model of that name by: it stands for another."""
    return name == DEFAULT or untagged(name) != name


class ModelNames(msgspec.Struct, frozen=True):
    """The models that the settings name."""

    # The model of a request that names none.
    default: str
    # The model for vendors' large models; "" means the default.
    _large: str = ""
    # The model for vendors' small models; "" means the large one.
    _small: str = ""

    @property
    def large(self) -> str:
        return self._large or self.default

    @property
    def small(self) -> str:
        return self._small or self.large

    def named(self, asked: str | None) -> str:
        """The name that a request means: ``asked``, or the default model's if the request names none."""
        return self.default if asked in (None, "", DEFAULT) else asked

    def answered(self, asked: str | None) -> str:
        """The name that an answer carries: ``asked``, or the default model's."""
        return asked or self.default

    def here(self, asked: str | None) -> str:
        """The name by which models are found for ``asked``: without a tag, and an alias replaced."""
        name = untagged(self.named(asked))
        return self.alias(name) or name

    def alias(self, name: str) -> str | None:
        """The model that a name stands for if no model has that name; None if the name is no alias."""
        if name.startswith(CLAUDE_PREFIX):
            real = name.removeprefix(CLAUDE_PREFIX)
            return None if is_path(real) else real or self.default
        if _VENDOR.match(name) is None:
            return None
        return self.small if _SMALL.search(name) else self.large
