"""The events of POST /fleet/v1/pair and /fleet/v1/join, and the answer of POST /fleet/v1/unpair.

The code, and what a person compares before a machine is let in, have no defaults: nothing stands in for them.
"""

from __future__ import annotations

import msgspec


class CodeShown(msgspec.Struct, frozen=True, tag="code"):
    """The window is open: this code is to be typed on the other machine.

    The window closes after ``expires_s`` seconds or ``tries`` wrong codes.
    """

    code: str
    expires_s: float = 0.0
    tries: int = 0
    name: str = ""
    port: int = 0
    addresses: list[str] = []


class WrongCode(msgspec.Struct, frozen=True, tag="wrong_code"):
    """Another machine tried a wrong code."""

    tries_left: int = 0


class Crowded(msgspec.Struct, frozen=True, tag="crowded"):
    """Connections that do not try the code fill the window, so that the oldest are closed; told once.

    ``addresses``: where they come from.
    """

    addresses: list[str] = []


class Searching(msgspec.Struct, frozen=True, tag="searching"):
    """``join`` looks for the machine that shows this code."""

    nameplate: str = ""


class Meeting(msgspec.Struct, frozen=True, tag="meeting"):
    """The code was right on both sides. The phrase has to be the same on both screens."""

    node_id: str
    short_id: str
    name: str
    phrase: str


class Paired(msgspec.Struct, frozen=True, tag="paired"):
    """Both machines have written the pairing to disk.

    ``sees_prompts``: the other machine sees those typed here. ``members``: the names of all machines.
    ``brought``: of those that are here on the other one's word, and see no prompts typed here until a person
    allows it.
    """

    node_id: str = ""
    short_id: str = ""
    name: str = ""
    sees_prompts: bool = False
    members: list[str] = []
    brought: list[str] = []


PairingEvent = CodeShown | WrongCode | Crowded | Meeting | Paired | Searching


class Unpaired(msgspec.Struct, frozen=True):
    """``told``: names of the machines that know already; ``pending``: of those that are away.

    ``gone``: of those that went with it, because this machine knew them through it alone; ``kept``: of those
    that a person here kept.
    """

    node_id: str = ""
    name: str = ""
    told: list[str] = []
    pending: list[str] = []
    gone: list[str] = []
    kept: list[str] = []
