"""Sets of JSON values, as schemas describe them: what two have in common, and whether that is nothing. Pure.

A set is a union of alternatives, each of one JSON type, or a reference to a named set. Composition
(``allOf``, keywords beside ``anyOf`` or ``$ref``) is resolved here: what is written for the library has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from math import lcm

from fleetd import limits
from fleetd.engine.grammar.patterns import Pattern
from fleetd.errors import InvalidValue, UnsupportedParameter

Number = int | Decimal


@dataclass(frozen=True)
class Null:
    """null."""


@dataclass(frozen=True)
class Booleans:
    values: frozenset[bool] = frozenset({False, True})


@dataclass(frozen=True)
class Numbers:
    """Numbers within bounds, or those that are listed."""

    #: Smallest and largest number, both allowed; None if nothing bounds them.
    low: Number | None = None
    high: Number | None = None
    whole: bool = False
    #: Each number is a multiple of this; None if any will do.
    step: Fraction | None = None
    #: The only numbers allowed, within the bounds above; None if they are not listed.
    values: tuple[Number, ...] | None = None

    def allows(self, value: Number) -> bool:
        """True if ``value`` is in the set, whatever is listed."""
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (not self.whole or value == int(value))
            and (self.step is None or (Fraction(value) / self.step).denominator == 1)
        )


@dataclass(frozen=True)
class Strings:
    """Strings of a length that match all patterns, or those that are listed."""

    least: int = 0
    most: int | None = None
    patterns: tuple[Pattern, ...] = ()
    #: The only strings allowed, if they match the patterns; None if they are not listed.
    values: tuple[str, ...] | None = None
    #: Where the patterns and lengths were said, for errors.
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Arrays:
    #: Sets of the first items, one each.
    first: tuple[ValueSet, ...] = ()
    #: Set of each later item; None is any value.
    rest: ValueSet | None = None
    least: int = 0
    most: int | None = None

    def item(self, index: int) -> ValueSet:
        return self.first[index] if index < len(self.first) else ANY if self.rest is None else self.rest


@dataclass(frozen=True)
class Objects:
    #: Names and the sets of their values, in the order in which they are written.
    properties: tuple[tuple[str, ValueSet], ...] = ()
    required: tuple[str, ...] = ()
    #: Set of other properties' values; None if the schema does not say.
    others: ValueSet | None = None
    #: Pattern of other names and the set of their values, said at ``pattern_where``.
    named: tuple[Pattern, ValueSet] | None = None
    least: int = 0
    most: int | None = None
    #: Where ``patternProperties`` and the number of properties were said, for errors.
    named_where: str = field(default="", compare=False)
    count_where: str = field(default="", compare=False)

    def value(self, name: str) -> ValueSet:
        """Set of a property's values. Not for names that a pattern could match."""
        return self._by_name.get(name, ANY if self.others is None else self.others)

    @cached_property
    def _by_name(self) -> dict[str, ValueSet]:
        return dict(self.properties)

    @property
    def closed(self) -> bool:
        """True if no properties but those of ``properties`` and ``named`` are written: the schema says so, or
        lists properties and does not say."""
        return self.others == NOTHING or (self.others is None and bool(self.properties or self.named))


@dataclass(frozen=True)
class Reference:
    """A named set, or what it has in common with others."""

    name: str
    #: What stands before and behind it in the schema, which decides on the order of keys.
    before: ValueSet = field(default_factory=lambda: ANY)
    behind: ValueSet = field(default_factory=lambda: ANY)


Alternative = Null | Booleans | Numbers | Strings | Arrays | Objects | Reference
ValueSet = tuple[Alternative, ...]

NOTHING: ValueSet = ()
ANY: ValueSet = (Null(), Booleans(), Numbers(), Strings(), Arrays(), Objects())


class Algebra:
    """Intersections and comparisons of sets, within a number of steps.

    Raises:
        InvalidValue: from any method, if the steps are used up.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._steps = limits.SCHEMA_COMBINATIONS
        #: Sets by name, as they are read.
        self.named: dict[str, ValueSet] = {}

    def _step(self, cost: int = 1) -> None:
        self._steps -= cost
        if self._steps < 0:
            raise InvalidValue(
                f"{self._where}: the combinations of anyOf, oneOf, allOf and $ref are more than "
                f"{limits.SCHEMA_COMBINATIONS:,}.",
                hint="Write the alternatives as one list, without allOf around them.",
                param=self._where,
            )

    # ---- Intersection ------------------------------------------------------------------------------------

    def common(self, one: ValueSet, other: ValueSet) -> ValueSet:
        """The values that are in both sets."""
        if one == ANY:
            return other
        if other == ANY:
            return one
        found: dict[Alternative, None] = {}
        plain = tuple(each for each in one if not isinstance(each, Reference))
        for a in one:
            if isinstance(a, Reference):
                found[replace(a, behind=self.common(a.behind, other))] = None
        for b in other:
            if isinstance(b, Reference) and plain:
                found[replace(b, before=self.common(plain, b.before))] = None
            elif not isinstance(b, Reference):
                found |= dict.fromkeys(both for a in plain if (both := self._both(a, b)) is not None)
        return tuple(found)

    def _both(self, a: Alternative, b: Alternative) -> Alternative | None:
        self._step(_cost(a) + _cost(b))
        match a, b:
            case Null(), Null():
                return a
            case Booleans(), Booleans():
                return Booleans(a.values & b.values) if a.values & b.values else None
            case Numbers(), Numbers():
                return _numbers(a, b)
            case Strings(), Strings():
                return _strings(a, b)
            case Arrays(), Arrays():
                return self._arrays(a, b)
            case Objects(), Objects():
                return self._objects(a, b)
        return None

    def _arrays(self, a: Arrays, b: Arrays) -> Arrays | None:
        least, most = max(a.least, b.least), _smaller(a.most, b.most)
        if most is not None and least > most:
            return None
        first = tuple(self.common(a.item(i), b.item(i)) for i in range(max(len(a.first), len(b.first))))
        return Arrays(first, self._optional(a.rest, b.rest), least, most)

    def _objects(self, a: Objects, b: Objects) -> Objects | None:
        least, most = max(a.least, b.least), _smaller(a.most, b.most)
        if most is not None and least > most:
            return None
        named = a.named or b.named
        where = a.named_where or b.named_where
        if named and (a.properties or b.properties or a.required or b.required or (a.named and b.named)):
            raise UnsupportedParameter(
                f"{where}: 'patternProperties' cannot be combined with other properties.",
                hint="List the properties, or use additionalProperties.",
                param=self._where,
            )
        names = dict.fromkeys([name for name, _ in a.properties] + [name for name, _ in b.properties])
        if named:
            open_side = b if a.named else a
            named = (named[0], self.common(named[1], ANY if open_side.others is None else open_side.others))
        return Objects(
            tuple((name, self.common(a.value(name), b.value(name))) for name in names),
            tuple(dict.fromkeys(a.required + b.required)),
            self._optional(a.others, b.others),
            named,
            least,
            most,
            where,
            a.count_where or b.count_where,
        )

    def _optional(self, one: ValueSet | None, other: ValueSet | None) -> ValueSet | None:
        if one is None or other is None:
            return one if other is None else other
        return self.common(one, other)

    # ---- References --------------------------------------------------------------------------------------

    def target(self, reference: Reference) -> ValueSet:
        """The set that a reference means; itself with references."""
        values = self.common(reference.before, self.named[reference.name])
        return self.common(values, reference.behind)

    def resolved(self, values: ValueSet, seen: frozenset[Reference] = frozenset()) -> Iterator[Alternative]:
        """Alternatives of a set and of the sets that it refers to as a whole.

        Raises:
            InvalidValue: a set that refers to itself as a whole, which means nothing.
        """
        for each in values:
            if not isinstance(each, Reference):
                yield each
                continue
            self._step()
            if each in seen or len(seen) > limits.SCHEMA_REFERENCES_IN_A_ROW:
                what = (
                    "refers to itself without end" if each in seen else "refers to too many others in a row"
                )
                raise InvalidValue(f"{self._where}: the schema at {each.name!r} {what}.", param=self._where)
            yield from self.resolved(self.target(each), seen | {each})

    # ---- Whether sets have nothing in common -------------------------------------------------------------

    def disjoint(self, one: ValueSet, other: ValueSet, depth: int = 0) -> bool:
        """True if it is certain that no value is in both sets."""
        if depth > limits.SCHEMA_REFERENCES_IN_A_ROW:
            return False
        others = list(self.resolved(other))
        return all(self._apart(a, b, depth) for a in self.resolved(one) for b in others)

    def _apart(self, a: Alternative, b: Alternative, depth: int) -> bool:
        self._step(_cost(a) + _cost(b))
        match a, b:
            case Numbers(), Numbers():
                return _numbers(a, b) is None
            case Strings(), Strings():
                return _strings(a, b) is None
            case Booleans(), Booleans():
                return not a.values & b.values
            case Arrays(), Arrays():
                least, most = max(a.least, b.least), _smaller(a.most, b.most)
                shared = range(min(least, max(len(a.first), len(b.first)) + 1))
                return (most is not None and least > most) or any(
                    self.disjoint(a.item(i), b.item(i), depth + 1) for i in shared
                )
            case Objects(), Objects():
                if a.named or b.named:
                    return False
                required = dict.fromkeys(a.required + b.required)
                return any(self.disjoint(a.value(name), b.value(name), depth + 1) for name in required)
        return type(a) is not type(b)


def _cost(alternative: Alternative) -> int:
    """Steps that one comparison with an alternative takes."""
    match alternative:
        case Numbers(values=values) | Strings(values=values):
            return 1 + len(values or ()) // 16
        case Objects(properties=properties):
            return 1 + len(properties) // 4
    return 1


def _smaller(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)


def _numbers(a: Numbers, b: Numbers) -> Numbers | None:
    step = a.step or b.step
    if a.step and b.step:
        step = Fraction(
            lcm(a.step.numerator * b.step.denominator, b.step.numerator * a.step.denominator),
            a.step.denominator * b.step.denominator,
        )
    low = b.low if a.low is None else a.low if b.low is None else max(a.low, b.low)
    high = b.high if a.high is None else a.high if b.high is None else min(a.high, b.high)
    both = Numbers(low, high, a.whole or b.whole, step)
    if a.values is not None or b.values is not None:
        listed = [values for values in (a.values, b.values) if values is not None]
        also = set(listed[-1])
        kept = tuple(value for value in listed[0] if value in also and both.allows(value))
        return Numbers(values=kept) if kept else None
    return both if has_numbers(both) else None


def has_numbers(numbers: Numbers) -> bool:
    """True if there are numbers between the bounds."""
    if numbers.low is None or numbers.high is None:
        return True
    step = numbers.step
    if numbers.whole:
        step = (
            Fraction(1) if step is None else Fraction(lcm(step.numerator, step.denominator), step.denominator)
        )
    if step is None:
        return numbers.low <= numbers.high
    return -(-Fraction(numbers.low) // step) * step <= numbers.high


def _strings(a: Strings, b: Strings) -> Strings | None:
    least, most = max(a.least, b.least), _smaller(a.most, b.most)
    patterns = tuple(dict.fromkeys(a.patterns + b.patterns))
    where = a.where or b.where
    if a.values is None and b.values is None:
        return None if most is not None and least > most else Strings(least, most, patterns, None, where)
    listed = [values for values in (a.values, b.values) if values is not None]
    also = set(listed[-1])
    values = tuple(
        each
        for each in listed[0]
        if each in also and len(each) >= least and (most is None or len(each) <= most)
    )
    return Strings(0, None, patterns, values, where) if values else None
