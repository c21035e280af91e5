"""Sampling parameters in request bodies, made from ``engine/sampling/parameters.PARAMETERS``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from fleetd.engine.sampling.parameters import PARAMETERS, Dialect, Sampling, SamplingParameter

Body = TypeVar("Body", bound=msgspec.Struct)

_SEED_MASK = 2**63 - 1


def takes_sampling(
    dialect: Dialect, parameters: Iterable[SamplingParameter] = PARAMETERS
) -> Callable[[type[Body]], type[Body]]:
    """Decorator that adds the parameters of a dialect to a body, each of them optional.

    Type checkers do not see these fields; ``sampling`` reads them.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(Sampling)}
    fields: list[tuple[str, Any, Any]] = []
    for each in parameters:
        if dialect in each.dialects:
            kind = (types[each.field] if each.asked is None else each.asked) | None
            if each.description:
                kind = Annotated[kind, Meta(description=each.description)]
            fields.append((each.name(dialect), kind, None))

    def extended(body: type[Body]) -> type[Body]:
        made = msgspec.defstruct(
            body.__name__,
            fields,
            bases=(body,),
            module=body.__module__,
            namespace={"__doc__": body.__doc__},
            frozen=True,
            kw_only=True,
        )
        return cast("type[Body]", made)

    return extended


def sampling(body: msgspec.Struct, dialect: Dialect, choice: int = 0) -> Sampling:
    """How tokens are chosen. A parameter that the body leaves out is left to the model.

    Choice i of a request gets ``seed + i``.
    """
    asked: dict[str, Any] = {}
    for each in PARAMETERS:
        value = getattr(body, each.name(dialect)) if dialect in each.dialects else None
        if value is not None and value != each.unset.get(dialect):
            asked[each.field] = each.read(value)
    if "seed" in asked:
        asked["seed"] = (asked["seed"] + choice) & _SEED_MASK
    return Sampling(**asked)
