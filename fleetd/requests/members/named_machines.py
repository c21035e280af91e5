"""The machines that a request names, as ``placement``: found among the members, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from fleetd.errors import FleetError, InvalidValue, NoMachine
from fleetd.p2p.membership.identity import short_id
from fleetd.plan.refusals import Code
from fleetd.requests.job import THIS_NAME
from fleetd.requests.members.members import Member, Members, eligible

_PARAM = "placement"


def named(members: Members, names: Sequence[str]) -> list[Member]:
    """The machines of these names or short ids, in this order; "this" is the machine that was asked.

    Raises:
        InvalidValue: no machine or several have a name, one is named twice, or this machine is not the first
            of several: it holds the first layers of a model that others hold with it.
        NoMachine: one of them may not be asked for work on prompts, with the reason.
    """
    here, others = members.here(), members.others("prefill")
    found = [_named(name, here, others, local_only=members.local_only) for name in names]
    for index, member in enumerate(found):
        if member.node_id in {before.node_id for before in found[:index]}:
            raise InvalidValue(f"{member.name} is named twice.", param=_PARAM)
    if len(found) > 1 and not found[0].here:
        hint = f"Begin the list with this machine, as {THIS_NAME!r}, or ask {found[0].name}."
        raise InvalidValue("The machine that is asked holds the first layers.", hint=hint, param=_PARAM)
    for member in found:
        if not member.here and (refusal := eligible(member, even_left_out=True, even_asleep=True)):
            raise NoMachine(refusal.sentence, hint=hint_for(refusal.code, member.name), param=_PARAM)
    return found


def hint_for(code: Code, name: str, model: str = "") -> str:
    """What to do about a machine that was named and cannot be used."""
    if code == "private":
        return f"`fleetctl peers prompts {name} yes` allows it."
    if code in ("other_files", "absent"):
        return f"Get the same files there: `fleetctl models pull {model}` on {name}."
    return "`fleetctl peers` shows each machine's state."


def _named(name: str, here: Member, others: Sequence[Member], *, local_only: bool) -> Member:
    key = name.strip().lower()
    if key in (THIS_NAME, here.name.lower(), here.card.name.lower()):
        return here
    if local_only:
        hint = "`fleet.local_only` keeps all prompts here."
        raise NoMachine(f"{name[:64]} is not asked: prompts stay here.", hint=hint, param=_PARAM)
    found = [each for each in others if key in (each.node_id, short_id(each.node_id))]
    found = found or [each for each in others if key in (each.name.lower(), each.card.name.lower())]
    if len(found) == 1:
        return found[0]
    raise _unknown(name[:64], [each.name for each in found or others], several=bool(found))


def _unknown(name: str, names: Sequence[str], *, several: bool) -> FleetError:
    listed = ", ".join(names)
    if several:
        return InvalidValue(
            f"Several machines are called {name}.", hint=f"Say which: {listed}.", param=_PARAM
        )
    hint = f"Paired and seen are: {listed}. " if names else ""
    return InvalidValue(
        f"No machine called {name} is paired with this one.",
        hint=hint + "`fleetctl pair` adds another one.",
        param=_PARAM,
    )
