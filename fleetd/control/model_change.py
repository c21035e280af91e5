"""What people do with the models of a machine, and how far it is: the events of /fleet/v1/models/pull."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from fleetd.text.bounded import Count, Text

#: Everything that may be asked of the models of another machine.
Verb = Literal["pull", "load", "unload", "pin", "unpin", "remove"]
#: How machines hold a model together: each some of its layers, or a part of every layer.
Split = Literal["layers", "tensors"]
VERBS: tuple[Verb, ...] = get_args(Verb)


class ModelProgress(msgspec.Struct, frozen=True):
    """How far a download or a load is."""

    # The name of the file that is brought; "" if it is none in particular.
    file: Text = ""
    # Bytes of this stage that are done, and of the whole stage; 0 if that is not known.
    done_bytes: Count = 0
    total_bytes: Count = 0
    # A word for people: connecting, downloading, copying, verifying, reading, warming up, measuring.
    stage: Text = ""


class ModelDone(msgspec.Struct, frozen=True):
    """The last event."""

    done: Literal[True] = True
    # The model's name on that machine.
    name: Text = ""
    # How machines hold it together and why, as sentences, if that was left to the planner.
    split: Split | UnsetType = UNSET
    why: Text | UnsetType = UNSET
