"""From a JSON schema to the sets of values that it describes. Pure.

Every keyword is enforced, an annotation, or refused with its name and path. While reading leniently, what
cannot be enforced is left out instead, which makes the sets larger.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from functools import cache
from typing import Any, NoReturn, TypeGuard
from urllib.parse import unquote

from fleetd import limits
from fleetd.engine.grammar.formats import PATTERNS
from fleetd.engine.grammar.patterns import Pattern, PatternError, translated
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
    has_numbers,
)
from fleetd.errors import InvalidValue, UnsupportedParameter
from fleetd.text.bounded import is_deeper

#: Keywords that would change what is valid and cannot be enforced.
REFUSED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "not",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_TYPES: dict[str, ValueSet] = {
    "null": (Null(),),
    "boolean": (Booleans(),),
    "integer": (Numbers(whole=True),),
    "number": (Numbers(),),
    "string": (Strings(),),
    "array": (Arrays(),),
    "object": (Objects(),),
}
#: What JSON text can only write by number, and halves of surrogate pairs.
_UNSPOKEN, _HALVES = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]"), re.compile("[\ud800-\udfff]")
#: Keywords that speak of one type each, which are read together.
_OF_ONE_TYPE = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "type"),
    }
)


class SchemaReader:
    """Reads one schema and all that it refers to.

    Raises:
        UnsupportedParameter: a keyword that cannot be enforced.
        InvalidValue: what is no schema, or beyond a bound.
    """

    def __init__(self, schema: Any, where: str, *, lenient: bool = False) -> None:
        self._root = schema
        self._where = where
        self._lenient = lenient
        self._parts = 0
        self._values = 0
        self._pattern_chars = 0
        #: Pointers of references whose sets are still to be read.
        self._pending: list[str] = []
        #: Paths of oneOf, with the sets of its options.
        self._one_of: list[tuple[str, list[ValueSet]]] = []
        self.algebra = Algebra(where)

    def read(self) -> ValueSet:
        """The set that the schema describes. Sets that it refers to are in ``algebra.named``."""
        if is_deeper(self._root, limits.SCHEMA_DEPTH):
            raise self._invalid(self._where, f"the schema is nested more than {limits.SCHEMA_DEPTH} deep")
        values = self._schema(self._root, self._where)
        while self._pending:
            pointer = self._pending.pop()
            path = f"{self._where}{pointer[1:]}"
            self.algebra.named[pointer] = self._schema(self._pointed(pointer, path), path)
        for path, options in self._one_of:
            self._apart(options, path)
        return values

    # ---- Refusals ----------------------------------------------------------------------------------------

    def _invalid(self, path: str, what: str) -> InvalidValue:
        return InvalidValue(f"{path}: {what}.", param=self._where)

    def _refuse(self, path: str, keyword: str, why: str = "") -> None:
        """Raises UnsupportedParameter, except while reading leniently."""
        if not self._lenient:
            raise UnsupportedParameter(
                f"{path}: the keyword {keyword!r} cannot be enforced{why and ': '}{why}.",
                hint=f"Leave {keyword!r} out, and say it in a description.",
                param=self._where,
            )

    def _too_many(self, path: str, most: int, what: str) -> NoReturn:
        raise self._invalid(path, f"more than {most:,} {what}")

    # ---- A schema ----------------------------------------------------------------------------------------

    def _schema(self, schema: Any, path: str) -> ValueSet:
        self._parts += 1
        if self._parts > limits.SCHEMA_PARTS:
            self._too_many(self._where, limits.SCHEMA_PARTS, "subschemas")
        if isinstance(schema, bool):
            return ANY if schema else NOTHING
        if not isinstance(schema, dict):
            raise self._invalid(path, "a schema is an object, true or false")
        refused = [keyword for keyword in schema if keyword in REFUSED]
        for keyword in refused:
            self._refuse(path, keyword)
        if "$id" in schema and path != self._where:
            self._refuse(path, "$id", "only the outermost schema may have one")
        values = ANY
        for part in self._in_order(schema):
            values = self.algebra.common(values, part(schema, path))
        if "oneOf" in schema:
            values = self._exactly_one(schema, values, path)
        if refused:  # left out: what they say of other properties is not known
            values = tuple(_opened(each) for each in values)
        if schema.get("nullable") is True and Null() not in values:
            values = (*values, Null())
        return values

    def _in_order(self, schema: dict[str, Any]) -> Iterator[Callable[[dict[str, Any], str], ValueSet]]:
        """What describes a part of the set, in the order of the schema: it is the order of keys."""
        readers = {"$ref": self._reference, "allOf": self._all_of, "anyOf": self._any_of}
        readers |= {"const": self._const, "enum": self._enum}
        typed = [keyword for keyword in schema if keyword in _OF_ONE_TYPE]
        anchor = "properties" if "properties" in typed else typed[0] if typed else ""
        for keyword in schema:
            if keyword == anchor:
                yield self._types
            elif keyword in readers:
                yield readers[keyword]

    # ---- Composition -------------------------------------------------------------------------------------

    def _reference(self, schema: dict[str, Any], path: str) -> ValueSet:
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise self._invalid(f"{path}/$ref", "it must be a string")
        root_id = self._root.get("$id") if isinstance(self._root, dict) else None
        if isinstance(root_id, str) and root_id and reference.startswith(f"{root_id.rstrip('#')}#"):
            reference = reference[len(root_id.rstrip("#")) :]
        if reference != "#" and not reference.startswith("#/"):
            self._refuse(path, "$ref", "only references within the schema, which begin with #/, are followed")
            return ANY
        if reference not in self.algebra.named:
            self.algebra.named[reference] = NOTHING
            self._pending.append(reference)
        return (Reference(reference),)

    def _pointed(self, pointer: str, path: str) -> Any:
        found = self._root
        for segment in pointer.split("/")[1:]:
            name = unquote(segment).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise self._invalid(path, "a $ref points to it, and the schema has nothing there")
        return found

    def _listed(self, schema: dict[str, Any], keyword: str, path: str) -> list[ValueSet]:
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise self._invalid(f"{path}/{keyword}", "it must be a list of schemas")
        return [self._schema(each, f"{path}/{keyword}/{i}") for i, each in enumerate(options)]

    def _all_of(self, schema: dict[str, Any], path: str) -> ValueSet:
        values = ANY
        for each in self._listed(schema, "allOf", path):
            values = self.algebra.common(values, each)
        return values

    def _any_of(self, schema: dict[str, Any], path: str) -> ValueSet:
        return _union(self._listed(schema, "anyOf", path))

    def _exactly_one(self, schema: dict[str, Any], values: ValueSet, path: str) -> ValueSet:
        sets = [self.algebra.common(values, each) for each in self._listed(schema, "oneOf", path)]
        if not self._lenient:
            self._one_of.append((path, sets))
        return _union(sets)

    def _apart(self, options: list[ValueSet], path: str) -> None:
        for i, one in enumerate(options):
            for j in range(i):
                if not self.algebra.disjoint(options[j], one):
                    self._refuse(
                        path,
                        "oneOf",
                        f"options {j} and {i} may both fit one value; use anyOf, or give both a required "
                        "property with different constants",
                    )

    # ---- Constants ---------------------------------------------------------------------------------------

    def _const(self, schema: dict[str, Any], path: str) -> ValueSet:
        return self._constants([schema["const"]], f"{path}/const")

    def _enum(self, schema: dict[str, Any], path: str) -> ValueSet:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise self._invalid(f"{path}/enum", "it must be a list of values")
        return self._constants(schema["enum"], f"{path}/enum")

    def _constants(self, values: list[Any], path: str) -> ValueSet:
        self._values += len(values)
        if self._values > limits.SCHEMA_VALUES:
            self._too_many(path, limits.SCHEMA_VALUES, "values of enums")
        strings = [self._spelled(each, path) for each in values if isinstance(each, str)]
        numbers = [self._constant_number(each, path) for each in values if _is_number(each)]
        booleans = frozenset(each for each in values if isinstance(each, bool))
        found: list[Alternative] = [Null()] if None in values else []
        if booleans:
            found.append(Booleans(booleans))
        if numbers:
            found.append(Numbers(values=tuple(dict.fromkeys(numbers))))
        if strings:
            found.append(Strings(values=tuple(dict.fromkeys(strings))))
        for each in values:
            if isinstance(each, list):
                first = tuple(self._constants([item], path) for item in each)
                found.append(Arrays(first, NOTHING, len(each), len(each)))
            elif isinstance(each, dict):
                pairs = tuple(
                    (self._name(name, path), self._constants([value], path)) for name, value in each.items()
                )
                found.append(Objects(pairs, tuple(each), NOTHING))
        return tuple(found)

    def _spelled(self, text: str, path: str) -> str:
        """A string that answers can spell."""
        if len(text) > limits.SCHEMA_VALUE_CHARS:
            self._too_many(path, limits.SCHEMA_VALUE_CHARS, "characters in one value")
        if _UNSPOKEN.search(text):
            raise self._unspeakable(path, "a control character")
        if _HALVES.search(text):
            raise self._invalid(path, "half of a surrogate pair is no text")
        return text

    def _name(self, name: str, path: str) -> str:
        return self._spelled(name, f"{path}/{name[:64]}")

    def _unspeakable(self, path: str, what: str) -> UnsupportedParameter:
        return UnsupportedParameter(
            f"{path}: {what} cannot be written by an answer.", hint="Leave it out.", param=self._where
        )

    def _constant_number(self, value: float, path: str) -> Number:
        number = self._number(value, path)
        if not -limits.SCHEMA_LARGEST <= number <= limits.SCHEMA_LARGEST:
            raise self._unspeakable(path, f"a number beyond {limits.SCHEMA_LARGEST:,}")
        return int(number) if number == int(number) else number

    def _number(self, value: Any, path: str) -> Number:
        if not _is_number(value) or not math.isfinite(value):
            raise self._invalid(path, "it must be a number")
        return value if isinstance(value, int) else Decimal(repr(value))

    # ---- Types -------------------------------------------------------------------------------------------

    def _types(self, schema: dict[str, Any], path: str) -> ValueSet:
        """What the keywords that speak of types, and of values of one type, describe."""
        listed = schema.get("type", [])
        names = [listed] if isinstance(listed, str) else listed
        if not isinstance(names, list) or any(
            not isinstance(each, str) or each not in _TYPES for each in names
        ):
            raise self._invalid(f"{path}/type", f"it must be one of {', '.join(_TYPES)}, or a list of them")
        if "type" in schema and not names:
            raise self._invalid(f"{path}/type", "the list is empty")
        kept = _union([_TYPES[each] for each in names]) if names else ANY
        if Numbers() in kept:
            kept = tuple(each for each in kept if each != Numbers(whole=True))
        described = (
            self._numbers(schema, path),
            self._strings(schema, path),
            self._arrays(schema, path),
            self._objects(schema, path),
        )
        return self.algebra.common(
            kept, (Null(), Booleans(), *(each for each in described if each is not None))
        )

    def _count(self, schema: dict[str, Any], keyword: str, path: str, most: int) -> int | None:
        if keyword not in schema:
            return None
        value = self._number(schema[keyword], f"{path}/{keyword}")
        if value < 0 or value != int(value):
            raise self._invalid(f"{path}/{keyword}", "it must be a whole number from 0 on")
        if value > most:
            raise self._invalid(
                f"{path}/{keyword}", f"{int(value):,} is more than the {most:,} that can be enforced"
            )
        return int(value)

    def _numbers(self, schema: dict[str, Any], path: str) -> Numbers | None:
        low = self._bound(schema, "minimum", "exclusiveMinimum", path)
        high = self._bound(schema, "maximum", "exclusiveMaximum", path, sign=-1)
        numbers = Numbers(low, None if high is None else -high, step=self._step(schema, path))
        return numbers if has_numbers(numbers) else None

    def _bound(
        self, schema: dict[str, Any], keyword: str, exclusive: str, path: str, sign: int = 1
    ) -> Number | None:
        """The least value allowed; for ``sign`` -1 the least of the negated values. What is more precise than
        the library counts is rounded up, to fewer values."""
        found: list[Number] = []
        strict = schema.get(exclusive)
        if keyword in schema:
            value = self._number(schema[keyword], f"{path}/{keyword}") * sign
            found.append(_above(value) if strict is True else value)
        if strict is not None and not isinstance(strict, bool):
            found.append(_above(self._number(strict, f"{path}/{exclusive}") * sign))
        if not found:
            return None
        bound = max(found)
        if bound > limits.SCHEMA_LARGEST:
            raise self._unspeakable(f"{path}/{keyword}", f"a number beyond {limits.SCHEMA_LARGEST:,}")
        return max(_rounded_up(bound), -limits.SCHEMA_LARGEST)

    def _step(self, schema: dict[str, Any], path: str) -> Fraction | None:
        if "multipleOf" not in schema:
            return None
        step = Fraction(self._number(schema["multipleOf"], f"{path}/multipleOf"))
        if step <= 0:
            raise self._invalid(f"{path}/multipleOf", "it must be more than 0")
        if decimal_digits(step) is None:
            self._refuse(
                path,
                "multipleOf",
                f"the number has more digits than {limits.SCHEMA_MULTIPLE:,} or 0.000000001",
            )
            return None
        return step

    def _strings(self, schema: dict[str, Any], path: str) -> Strings | None:
        least = self._count(schema, "minLength", path, limits.SCHEMA_STRING_CHARS) or 0
        most = self._count(schema, "maxLength", path, limits.SCHEMA_STRING_CHARS)
        patterns = []
        if "pattern" in schema:
            patterns += self._pattern(schema["pattern"], path, "pattern")
        name = schema.get("format")
        if isinstance(name, str) and name in PATTERNS:
            patterns.append(_of_format(name))
        if most is not None and least > most:
            return None
        return Strings(least, most, tuple(patterns), None, path)

    def _pattern(self, pattern: Any, path: str, keyword: str) -> list[Pattern]:
        """The pattern for the library; nothing if it is left out."""
        if not isinstance(pattern, str):
            raise self._invalid(f"{path}/{keyword}", "it must be a string")
        self._pattern_chars += len(pattern)
        if self._pattern_chars > limits.SCHEMA_PATTERN_CHARS:
            self._too_many(f"{path}/{keyword}", limits.SCHEMA_PATTERN_CHARS, "characters in patterns")
        try:
            return [translated(pattern)]
        except PatternError as error:
            if error.malformed and not self._lenient:
                raise self._invalid(f"{path}/{keyword}", f"the pattern is malformed: {error}") from None
            self._refuse(path, keyword, str(error))
            return []

    def _arrays(self, schema: dict[str, Any], path: str) -> Arrays | None:
        if schema.get("uniqueItems", False) is not False:
            self._refuse(path, "uniqueItems")
        least = self._count(schema, "minItems", path, limits.SCHEMA_ITEMS) or 0
        most = self._count(schema, "maxItems", path, limits.SCHEMA_ITEMS)
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # as before draft 2020-12
            first, rest = "items", "additionalItems"
        sets = self._listed(schema, first, path) if schema.get(first) else []
        later = self._schema(schema[rest], f"{path}/{rest}") if rest in schema else None
        if most is not None and least > most:
            return None
        return Arrays(tuple(sets), later, least, most)

    def _objects(self, schema: dict[str, Any], path: str) -> Objects | None:
        required = schema.get("required", [])
        if not isinstance(required, list) or any(not isinstance(each, str) for each in required):
            raise self._invalid(f"{path}/required", "it must be a list of names")
        least = self._count(schema, "minProperties", path, limits.SCHEMA_ITEMS) or 0
        most = self._count(schema, "maxProperties", path, limits.SCHEMA_ITEMS)
        properties = self._properties(schema, "properties", path)
        others = None
        if "additionalProperties" in schema:
            others = self._schema(schema["additionalProperties"], f"{path}/additionalProperties")
        if most is not None and least > most:
            return None
        objects = Objects(
            tuple(properties.items()),
            tuple(dict.fromkeys(self._name(each, f"{path}/required") for each in required)),
            others,
            None,
            least,
            most,
            count_where=path,
        )
        return self._names(self._named(objects, schema, path), schema, path)

    def _properties(self, schema: dict[str, Any], keyword: str, path: str) -> dict[str, ValueSet]:
        properties = schema.get(keyword, {})
        if not isinstance(properties, dict):
            raise self._invalid(f"{path}/{keyword}", "it must be an object of schemas")
        if len(properties) > limits.SCHEMA_PROPERTIES:
            self._too_many(f"{path}/{keyword}", limits.SCHEMA_PROPERTIES, "properties")
        return {
            self._name(name, f"{path}/{keyword}"): self._schema(each, f"{path}/{keyword}/{name[:64]}")
            for name, each in properties.items()
        }

    def _named(self, objects: Objects, schema: dict[str, Any], path: str) -> Objects:
        """The same with patternProperties, of which one pattern alone can be enforced."""
        named = self._properties(schema, "patternProperties", path)
        if not named:
            return objects
        if len(named) > 1 or objects.properties or objects.required:
            self._refuse(path, "patternProperties", "one pattern without other properties can")
            return replace(objects, others=ANY)
        ((name, values),) = named.items()
        patterns = self._pattern(name, path, "patternProperties")
        if not patterns:
            return replace(objects, others=ANY)
        return replace(objects, named=(patterns[0], values), named_where=path)

    def _names(self, objects: Objects, schema: dict[str, Any], path: str) -> Objects:
        """The same with propertyNames: any string, one pattern, or a list of names."""
        if "propertyNames" not in schema:
            return objects
        names = self._schema(schema["propertyNames"], f"{path}/propertyNames")
        strings = [each for each in names if isinstance(each, Strings)]
        others = ANY if objects.others is None else objects.others
        plain = len(strings) == 1 == len([each for each in names if isinstance(each, Strings | Reference)])
        if plain and strings[0] == Strings():
            return objects
        alone = plain and not objects.properties and not objects.named
        if alone and strings[0].values and not strings[0].patterns:
            listed = tuple((name, others) for name in strings[0].values)
            if {*objects.required} <= {*strings[0].values}:
                return replace(objects, properties=listed, others=NOTHING)
        patterns = strings[0].patterns if alone and not objects.required else ()
        if len(patterns) == 1 and strings[0] == Strings(patterns=patterns):
            return replace(objects, named=(patterns[0], others), others=NOTHING, named_where=path)
        self._refuse(path, "propertyNames", "a pattern or an enum, without properties beside it, can")
        return objects


@cache
def _of_format(name: str) -> Pattern:
    return translated(PATTERNS[name])


def _union(sets: list[ValueSet]) -> ValueSet:
    return tuple(dict.fromkeys(each for values in sets for each in values))


def _opened(alternative: Alternative) -> Alternative:
    """The same; objects may have other properties unless the schema says otherwise."""
    if isinstance(alternative, Objects) and alternative.others is None:
        return replace(alternative, others=ANY)
    return alternative


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _above(bound: Number) -> Number:
    """The least double that is more than ``bound``, as decimal digits."""
    return Decimal(repr(math.nextafter(float(bound), math.inf)))


def _rounded_up(bound: Number) -> Number:
    if isinstance(bound, int) or bound == int(bound):
        return int(bound)
    exact = Context(prec=64, rounding=ROUND_CEILING)
    return exact.quantize(bound, Decimal(1).scaleb(-limits.SCHEMA_DECIMALS)).normalize(exact)


def decimal_digits(step: Fraction) -> float | None:
    """A step as the library reads it, or None if it would read another number or take too long with it."""
    value = float(step)
    digits, exponent = value, 0
    while digits % 1 and exponent < limits.SCHEMA_MULTIPLE_DECIMALS:
        digits, exponent = digits * 10, exponent + 1
    exact = Fraction(int(digits), 10**exponent) == step
    return value if exact and digits <= limits.SCHEMA_MULTIPLE else None
