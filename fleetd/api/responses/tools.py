"""The tools of a Responses request, as templates know them, and back. Pure.

Templates know functions only. A custom tool, which takes free text, becomes a function with one text; a
namespace becomes a prefix of its tools' names. ``ToolTable`` turns the model's calls into the client's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fleetd.api.generation import answer_form, conversation
from fleetd.api.generation.conversation import Plain
from fleetd.api.responses.bodies import GrammarInput, ResponseTool
from fleetd.errors import InvalidValue
from fleetd.text.decoding import from_json

# The one argument of a custom tool.
_INPUT = "input"


class ClientTool(msgspec.Struct, frozen=True):
    """What the client calls a tool by."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolTable:
    """Args:
    definitions: as templates read them.
    served: as the client sent them.
    warnings: what was left out.
    strict: as ``ChatPrompt.strict_tools`` has them.
    """

    definitions: list[Plain] = field(default_factory=list)
    served: list[ResponseTool] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    strict: dict[str, str] = field(default_factory=dict)
    _known: dict[str, ClientTool] = field(default_factory=dict)

    def called(self, name: str) -> ClientTool:
        """The tool that a model means; one of its own invention is taken for a function."""
        return self._known.get(name) or ClientTool(name)

    def add(self, tools: Sequence[ResponseTool], where: str = "tools", namespace: str | None = None) -> None:
        """Raises InvalidValue, UnsupportedParameter."""
        for i, tool in enumerate(tools):
            place = f"{where}[{i}]"
            if tool.kind in ("function", "custom"):
                self._add(tool, place, namespace)
            elif tool.kind == "namespace" and namespace is None:
                self.add(tool.tools or (), f"{place}.tools", _named(tool, place))
            else:
                self.warnings.append(
                    f"{place}: a tool of type {tool.kind[:64]!r} was left out: this server runs none itself."
                )
                continue
            if namespace is None:
                self.served.append(tool)

    def _add(self, tool: ResponseTool, where: str, namespace: str | None) -> None:
        name, custom = _named(tool, where), tool.kind == "custom"
        known = full_name(name, namespace)
        self._known[known] = ClientTool(name, namespace, custom)
        description = _described(tool) if custom else tool.description
        parameters = _FREE_TEXT if custom else tool.parameters
        if custom and isinstance(tool.format, GrammarInput):
            self.strict[known] = _lark(tool.format)
        elif tool.strict and not custom:
            self.strict |= answer_form.strict_tools([(known, parameters, f"{where}.parameters")])
        self.definitions.append(conversation.tool(known, description, parameters, where))


def full_name(name: str, namespace: str | None) -> str:
    """The name by which a model knows a tool."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def as_arguments(text: str) -> Plain:
    """A custom tool's input as arguments of the function that stands for it."""
    return {_INPUT: text}


@dataclass(slots=True)
class FreeText:
    """A custom tool's input while a model writes the arguments around it, in pieces of any size.

    What is not the expected object tells no text before it is whole: ``free_text`` reads it then.
    """

    text: str = ""
    begun: bool = False
    _head: str = ""
    # What of the input cannot be read yet: the beginning of an escape.
    _rest: str = ""
    _ended: bool = False

    def feed(self, arguments: str) -> str:
        """More of the arguments; returns what that adds to the input."""
        if self._ended or (not self.begun and len(self._head) > _HEAD_CHARS):
            return ""
        if not self.begun:
            self._head += arguments
            found = _HEAD.match(self._head)
            if found is None:
                return ""
            self.begun, arguments = True, self._head[found.end() :]
        added, self._rest, self._ended = _read(self._rest + arguments)
        self.text += added
        return added


def _read(text: str) -> tuple[str, str, bool]:
    """A part of a JSON string as far as it can be read: what it says, what is left, whether it has ended.

    Models write line ends as they are, and escapes that JSON does not know, which stay as they are.
    """
    found = _WHOLE.match(text)
    end = found.end() if found else 0
    ended = text[end : end + 1] == '"'
    if not ended and (half := _HALF.search(text, 0, end)):
        end = half.start()
    said: str = json.loads(f'"{_ESCAPE.sub(_as_json, text[:end])}"', strict=False)
    # A half of a character that has no other half is none.
    return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), text[end:], ended


def _as_json(escape: re.Match[str]) -> str:
    known = len(escape[1]) > 1 or escape[1] in '"\\/bfnrt'
    return escape[0] if known else f"\\{escape[0]}"


def free_text(arguments: str) -> str:
    """A custom tool's input from the arguments that a model wrote: its one text, under whatever name."""
    found = FreeText()
    found.feed(arguments)
    if found.begun:
        return found.text
    try:
        fields = from_json(arguments, dict[str, str])
    except msgspec.MsgspecError:
        return arguments
    return fields.get(_INPUT, next(iter(fields.values()), "") if len(fields) <= 1 else arguments)


# What stands before the input's first character, and what would be too long for that.
_HEAD_CHARS = 256
_HEAD = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
# Characters and escapes of a JSON string, but for an escape at the end that may not be whole.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}|u(?![0-9a-fA-F]{4})(?![0-9a-fA-F]{0,3}\Z)))*', re.DOTALL
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
# The first half of a character that has two.
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
# A slash of a regular expression, and what is escaped already.
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_FREE_TEXT: Plain = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}


def _named(tool: ResponseTool, where: str) -> str:
    if tool.name is None:
        raise InvalidValue(
            f"{where}: a tool of type {tool.kind!r} needs a name.",
            hint="In this API name, description and parameters stand beside type.",
            param=where,
        )
    return tool.name


def _described(tool: ResponseTool) -> str | None:
    """A description that has the grammar of the input. The input is held to it all the same: a model that
    knows it means the text that it writes."""
    if not isinstance(tool.format, GrammarInput):
        return tool.description
    grammar = f"The input has this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    return "\n\n".join(filter(None, [tool.description, grammar]))


def _lark(form: GrammarInput) -> str:
    """The grammar of a custom tool's input, in Lark's notation, where a slash ends an expression."""
    if form.syntax == "lark":
        return form.definition
    expression = _SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], form.definition)
    expression = expression.replace("\n", r"\n").replace("\r", r"\r")
    return f"start: /{expression}/"
