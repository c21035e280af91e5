"""From sets of values to a schema that the library enforces as it stands. Pure.

The text has no composition but ``anyOf`` and references, no annotations, and no set without values: those are
left out, or are the reason why the schema is refused.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Any

from fleetd import limits
from fleetd.engine.grammar.schema_reading import decimal_digits
from fleetd.engine.grammar.value_sets import (
    ANY,
    NOTHING,
    Algebra,
    Alternative,
    Arrays,
    Booleans,
    Null,
    Number,
    Numbers,
    Objects,
    Reference,
    Strings,
    ValueSet,
)
from fleetd.errors import InvalidValue, UnsupportedParameter


class SchemaWriter:
    """Writes the sets of one schema.

    Raises:
        UnsupportedParameter: what only shows once all is put together, such as a number of properties.
        InvalidValue: no finite value is in the set, or it is beyond a bound.
    """

    def __init__(self, algebra: Algebra, where: str, *, lenient: bool = False) -> None:
        self._algebra = algebra
        self._where = where
        self._lenient = lenient
        #: What each reference means, and its name in the text.
        self._targets: dict[Reference, ValueSet] = {}
        self._names: dict[Reference, str] = {}
        #: References to sets with at least one finite value.
        self._finite: set[Reference] = set()
        # What ``_one_ends`` has found. Without it each level of an object would be looked at twice, and all
        # below it as often.
        self._known: dict[Alternative, bool] = {}

    def written(self, values: ValueSet) -> dict[str, Any]:
        """The schema of a set, with the sets that it refers to."""
        self._follow(values)
        self._find_finite()
        schema = self._set(values)
        if schema is False:
            raise InvalidValue(
                f"{self._where}: no value is valid by this schema, or none that ends.", param=self._where
            )
        definitions = {
            self._names[each]: self._set(target)
            for each, target in self._targets.items()
            if each in self._finite
        }
        written = {} if schema is True else schema
        return {**written, "$defs": definitions} if definitions else written

    # ---- References --------------------------------------------------------------------------------------

    def _follow(self, values: ValueSet) -> None:
        """Finds all references that a set has, and what they mean."""
        pending = [values]
        while pending:
            for each in _references(pending.pop()):
                if each not in self._targets:
                    for _ in self._algebra.resolved((each,)):
                        pass
                    self._names[each] = f"s{len(self._names)}"
                    self._targets[each] = self._algebra.target(each)
                    pending.append(self._targets[each])

    def _find_finite(self) -> None:
        found = True
        while found:
            found = False
            for each, target in self._targets.items():
                if each not in self._finite and self._ends(target):
                    self._finite.add(each)
                    self._known.clear()
                    found = True

    def _ends(self, values: ValueSet) -> bool:
        """True if a value of the set is finite."""
        return any(self._one_ends(each) for each in _spoken(values))

    def _one_ends(self, alternative: Alternative) -> bool:
        if alternative not in self._known:
            self._known[alternative] = self._may_end(alternative)
        return self._known[alternative]

    def _may_end(self, alternative: Alternative) -> bool:
        match alternative:
            case Reference():
                return alternative in self._finite
            case Arrays():
                if not alternative.least:
                    return True
                firsts = alternative.first[: alternative.least]
                later = alternative.least <= len(alternative.first) or self._ends(
                    alternative.item(len(alternative.first))
                )
                return later and all(self._ends(each) for each in firsts)
            case Objects():
                if alternative.most is not None and len(alternative.required) > alternative.most:
                    return False
                if alternative.closed and not alternative.named:
                    names = {*alternative.required, *(name for name, _ in alternative.properties)}
                    if alternative.least > len(
                        [each for each in names if self._ends(alternative.value(each))]
                    ):
                        return False
                return all(self._ends(alternative.value(each)) for each in alternative.required)
        return True

    # ---- Sets --------------------------------------------------------------------------------------------

    def _set(self, values: ValueSet) -> dict[str, Any] | bool:
        kept = [each for each in _spoken(values) if self._one_ends(each)]
        if set(kept) == set(ANY):
            return True
        self._check_width(kept)
        written = [self._alternative(each) for each in kept]
        if not written:
            return False
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _check_width(self, values: list[Alternative]) -> None:
        objects = [each for each in self._algebra.resolved(tuple(values)) if isinstance(each, Objects)]
        optional = sum(
            len(each.properties) - len(each.required)
            for each in objects
            if len(each.properties) > len(each.required)
        )
        if optional > limits.SCHEMA_OPTIONAL:
            raise InvalidValue(
                f"{self._where}: at one place {optional:,} properties may be left out, more than the "
                f"{limits.SCHEMA_OPTIONAL} that can be enforced.",
                hint="Require more of them, and allow null where there is no value.",
                param=self._where,
            )

    def _alternative(self, alternative: Alternative) -> dict[str, Any]:
        match alternative:
            case Null():
                return {"type": "null"}
            case Booleans(values=values):
                return {"type": "boolean"} if len(values) > 1 else {"const": min(values)}
            case Numbers():
                return self._numbers(alternative)
            case Strings():
                return self._strings(alternative)
            case Arrays():
                return self._arrays(alternative)
            case Objects():
                return self._objects(alternative)
        return {"$ref": f"#/$defs/{self._names[alternative]}"}

    def _numbers(self, numbers: Numbers) -> dict[str, Any]:
        if numbers.values is not None:
            return {"enum": [_json_number(each) for each in numbers.values]}
        low, high, step = numbers.low, numbers.high, numbers.step
        if numbers.whole:
            low = None if low is None else math.ceil(low)
            high = None if high is None else math.floor(high)
            if step is not None:
                step = Fraction(lcm(step.numerator, step.denominator), step.denominator)
        written: dict[str, Any] = {"type": "integer" if numbers.whole else "number"}
        if low is not None:
            written["minimum"] = _json_number(low)
        if high is not None:
            written["maximum"] = _json_number(high)
        if step is not None and not (numbers.whole and step == 1):
            digits = decimal_digits(step)
            if digits is not None:
                written["multipleOf"] = digits
            elif not self._lenient:
                raise UnsupportedParameter(
                    f"{self._where}: the keyword 'multipleOf' cannot be enforced for {step}.",
                    param=self._where,
                )
        return written

    def _strings(self, strings: Strings) -> dict[str, Any]:
        patterns, least, most = list(strings.patterns), strings.least, strings.most
        if len(patterns) == 1 and patterns[0].repeated and strings.values is None:
            patterns, least, most = [patterns[0].of_length(least, most)], 0, None
        if len(patterns) > limits.SCHEMA_PATTERNS_AT_ONCE and not self._lenient:
            raise UnsupportedParameter(
                f"{strings.where}: the keyword 'pattern' cannot be enforced more than "
                f"{limits.SCHEMA_PATTERNS_AT_ONCE} times for one string.",
                hint="Write one pattern.",
                param=self._where,
            )
        patterns = patterns[: limits.SCHEMA_PATTERNS_AT_ONCE]
        least = 0 if any(each.least >= least for each in patterns) else least
        if any(each.most is not None and most is not None and each.most <= most for each in patterns):
            most = None
        written: dict[str, Any] = (
            {"type": "string"} if strings.values is None else {"enum": list(strings.values)}
        )
        if least:
            written["minLength"] = least
        if most is not None:
            written["maxLength"] = most
        if patterns:
            written["pattern"] = patterns[0].anchored()
        if patterns[1:]:
            written["allOf"] = [{"type": "string", "pattern": each.anchored()} for each in patterns[1:]]
        return written

    def _arrays(self, arrays: Arrays) -> dict[str, Any]:
        written: dict[str, Any] = {"type": "array"}
        first = [self._set(each) for each in arrays.first]
        if False in first:
            first = first[: first.index(False) + 1]
        if first:
            written["prefixItems"] = first
        if arrays.rest is not None:
            written["items"] = self._set(arrays.rest)
        if arrays.least:
            written["minItems"] = arrays.least
        if arrays.most is not None:
            written["maxItems"] = arrays.most
        return written

    # ---- Objects -----------------------------------------------------------------------------------------

    def _objects(self, objects: Objects) -> dict[str, Any]:
        names = dict.fromkeys([*(name for name, _ in objects.properties), *objects.required])
        required = set(objects.required)
        properties: dict[str, Any] = {}
        for name in names:
            schema = self._set(objects.value(name))
            if schema is not False or not objects.closed:
                properties[name] = schema
        optional = [name for name in properties if name not in required and properties[name] is not False]
        counts = self._counts(objects, optional)
        if counts.get("maxProperties") == len(required):  # as many as are required: no others
            for name in optional:
                del properties[name]
            return self._object(properties, objects, closed=True)
        return {**self._object(properties, objects, closed=objects.closed), **counts}

    def _object(self, properties: dict[str, Any], objects: Objects, *, closed: bool) -> dict[str, Any]:
        written: dict[str, Any] = {"type": "object"}
        if properties:
            written["properties"] = properties
        if objects.required:
            written["required"] = list(objects.required)
        if objects.named is not None:
            pattern, values = objects.named
            written["patternProperties"] = {pattern.anchored(): self._set(values)}
        if closed:
            written["additionalProperties"] = False
        elif objects.others is not None:
            written["additionalProperties"] = self._set(objects.others)
        return written

    def _counts(self, objects: Objects, optional: list[str]) -> dict[str, int]:
        """minProperties and maxProperties, as far as they say more than ``required``."""
        required = len(objects.required)
        least = objects.least if objects.least > required else None
        most = objects.most
        bounded = objects.closed and objects.named is None
        if bounded and most is not None and most >= required + len(optional):
            most = None
        counts = {"minProperties": least, "maxProperties": most}
        said = {name: count for name, count in counts.items() if count is not None}
        if not said or most == required:
            return said
        if bounded:
            one_of_them = least in (None, required + 1) and most in (None, required + 1)
            possible = one_of_them and len(optional) <= limits.SCHEMA_AT_LEAST_ONE
        else:
            # Names that are not listed may be written twice: no more than one of them can be asked for.
            possible = not optional and least in (None, required + 1)
        if possible:
            return said
        if not self._lenient:
            raise UnsupportedParameter(
                f"{objects.count_where}: the keyword {next(iter(said))!r} cannot be enforced: only one "
                f"property more than those that are required, of at most {limits.SCHEMA_AT_LEAST_ONE}, can.",
                hint="List the alternatives with anyOf and required.",
                param=self._where,
            )
        return {}


def _spoken(values: ValueSet) -> ValueSet:
    """The alternatives of the one type that a schema speaks of, if it speaks of one and allows all values of
    the others: so does a schema without a type."""
    spoken = tuple(each for each in values if each not in ANY)
    everything = {type(each) for each in values} == {type(each) for each in ANY}
    return spoken if everything and spoken and len(values) - len(spoken) == len(ANY) - 1 else values


def _references(values: ValueSet) -> list[Reference]:
    """All references in a set, at any depth, in the order of the text."""
    found: list[Reference] = []
    for each in values:
        inner: list[ValueSet] = []
        match each:
            case Reference():
                found.append(each)
            case Arrays():
                inner = [*each.first, each.rest or NOTHING]
            case Objects():
                inner = [set_ for _, set_ in each.properties]
                inner += [each.others or NOTHING, each.named[1] if each.named else NOTHING]
        for set_ in inner:
            found += _references(set_)
    return found


def _json_number(number: Number) -> float:
    return float(number) if isinstance(number, Decimal) else number
