"""What people do with the models of a machine, and how far it is: the events of /fleet/v1/models/pull."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fleetd import limits
from fleetd.text.bounded import Count, Text

#: Everything that may be asked of the models of another machine.
Verb = Literal["pull", "load", "unload", "pin", "unpin", "remove"]
#: How machines hold a model together: each some of its layers, or a part of every layer.
Split = Literal["layers", "tensors"]
#: The stage of a load in which weights are read: it counts their bytes.
READING = "reading"
#: Stages in which layers are fetched: they count the bytes that come. The machine that asks fetches those of
#: one that does not reach the hub.
FETCHING_HERE = "downloading here"
FETCHING = frozenset({"copying", "downloading", FETCHING_HERE})
VERBS: tuple[Verb, ...] = get_args(Verb)


class MemberProgress(msgspec.Struct, frozen=True):
    """How far one machine is with its layers of a model over several."""

    # The machine's name.
    name: Text = ""
    # What it does: downloading, downloading here, copying, fetched, promised, verifying, reading, warming up,
    # measuring, loaded.
    stage: Text = ""
    # Bytes of its layers that are in its memory, and all of them, as planned; while it fetches layers, those
    # that have come, and all that it fetches.
    done_bytes: Count = 0
    total_bytes: Count = 0


class ModelProgress(msgspec.Struct, frozen=True):
    """How far a download or a load is."""

    # The name of the file that is brought; "" if it is none in particular.
    file: Text = ""
    # Bytes of this stage that are done, and of the whole stage; 0 if that is not known.
    done_bytes: Count = 0
    total_bytes: Count = 0
    # A word for people: connecting, downloading, copying, verifying, reading, warming up, measuring.
    stage: Text = ""
    # Of a load over several machines, the others, and "this" while it fetches its own layers; the bytes above
    # are of all of these together.
    members: Annotated[list[MemberProgress], Meta(max_length=limits.PLACEMENT_MACHINES)] | UnsetType = UNSET


class ModelDone(msgspec.Struct, frozen=True):
    """The last event."""

    done: Literal[True] = True
    # The model's name on that machine.
    name: Text = ""
    # How machines hold it together and why, as sentences, if that was left to the planner.
    split: Split | UnsetType = UNSET
    why: Text | UnsetType = UNSET
