"""Why a machine is not asked, as a code for programs and a sentence for people; and this machine's own id."""

from __future__ import annotations

from typing import Literal

import msgspec

# This machine's id in the planner and wherever a request is placed. It sorts before every other id.
THIS_NODE = ""

Code = Literal[
    # what the prompt is
    "unshareable",
    "short",
    "context",
    # what the machine is, or does
    "tried",
    "private",
    "unusable",
    "draining",
    "failed",
    "busy",
    "full",
    # the model on the machine
    "absent",
    "wrong_role",
    "other_files",
    "files_unknown",
    "dtype",
    "part",
    # its memory and its link
    "too_small",
    "no_memory",
    "no_room",
    "cold",
    "slow_link",
    # the price
    "slower",
    "margin",
    "unmeasured",
    "doubtful",
    "kept",
]


class Refusal(msgspec.Struct, frozen=True):
    code: Code
    sentence: str
