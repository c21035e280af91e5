"""What a text consists of: prose, code, tables and JSON, found by looking at its lines.

"See below.\\n```python\\nx = 1\\n```\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n"
 └ prose ──┘└ fence (code inside) ──┘└ table (two header lines) ───────┘
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from fleetd.compression.json_values import JsonNode, Scanner
from fleetd.compression.words import Range, lines

Kind = Literal["prose", "code", "fence", "table", "json"]

# A JSON string this long is cut between its lines: files and logs come wrapped in JSON.
LONG_STRING_CHARS = 1024
# Shorter JSON is a remark in a sentence, not data.
_JSON_CHARS = 48

_FENCE = re.compile(r"`{3,}|~{3,}")
# What may stand in front of a fence: depth, as in a list, and the marks of a quotation.
_BEFORE_FENCE = " \t>"
# The line under a table's head, without its spaces.
_RULE = re.compile(r"\|?:?-{2,}:?(?:\|:?-{2,}:?)+\|?$")
# What may stand around JSON on its first and on its last line: a tag, a name.
_BEFORE_JSON = re.compile(r"(?:<[\w:.-]{1,40}(?: [^<>]{1,120})?>|[\w.'-][\w .'-]{0,60}[:=]) ?$")
_AFTER_JSON = re.compile(r"\s*(?:</[\w:.-]{1,40}>|[;,)])?\s*$")
_AROUND_JSON_CHARS = 200
_SEPARATORS = ("\t", "|", ";", ",")
_TABLE_ROWS = 5
_TABLE_ROW_CHARS = 400

# A number in front of each line, as tools show files.
_NUMBER = re.compile(r"[ \t]{0,12}\d{1,9}(?:\t|[ ]{0,12}[|:\u2192] ?)")
# Of a line without the spaces around it and with single ones in it.
_CODE_LINE = re.compile(
    r"""(?:
        .*[;{}\[(\\]$ | .*\)\s*[:{]$ | .*(?:=>|->)\s*[\w{(\[]* $
      | [)\]}][)\]},;]*$ | @\w[\w.]*(?:\(.*)?$ | \#(?:include|define|if|endif|!)
      | //|/\*|\*/|--\s\w|"{3}|'{3}
      | (?:async\s+)?(?:def|fn|func|function)\s+\w+.*[(:{]
      | (?:class|struct|enum|trait|impl|interface|namespace|module|package)\s+[\w.<>:]+.*[:{;(]?$
      | (?:from\s+[\w.]+\s+)?import\s+[\w.{*"(] | (?:use|using|require|include)\s+[\w.:"'<]+;?$
      | (?:if|elif|else|for|while|with|try|except|finally|switch|match|case|do)\b.*[:{]$
      | (?:return|raise|throw|yield|break|continue|pass|end|fi|done|esac|goto|assert|await|del)\b[^.]*;?$
      | (?:const|let|var|val|static|public|private|protected|final|export|extern|mut|local)\s+\w
      | (?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|DROP|FROM|WHERE|JOIN|GROUP|ORDER)\b
      | [\w.\[\]"'*&>-]+(?:\s*:\s*[\w\[\]., |]+)?\s*[-+*/|&^%:]?=[^=~].*$ | [\w.:>-]+\(.*\)[;,]?$
      | (?:\+\+\+|---|@@)\s | \$\s\w
    )""",
    re.VERBOSE,
)
# Of a long line its two ends tell: what matches takes time that grows with the square of its length.
_CODE_LINE_CHARS = 300, 100
_CODE_SHARE = 0.5
_CODE_LINES = 2


class Region(msgspec.Struct, frozen=True):
    """Characters ``[start, end)`` of a text. ``body``: the inside of a fence, or the rows of a table.

    The body of an unclosed fence ends with the text. ``node``: the values of JSON, also where it is
    fenced.
    """

    kind: Kind
    start: int
    end: int
    body: Range
    node: JsonNode | None = None


def regions(text: str) -> list[Region]:
    """Regions that tile ``text``."""
    found: list[Region] = []
    scanner = Scanner(text, LONG_STRING_CHARS)
    rows = lines(text, 0, len(text))
    at, plain = 0, 0  # indexes of lines
    while at < len(rows):
        taken = _fence(text, rows, at, scanner) or _json(text, rows, at, scanner) or _table(text, rows, at)
        if taken is None:
            at += 1
            continue
        found += _plain(text, rows[plain:at])
        found.append(taken)
        while at < len(rows) and rows[at][0] < taken.end:
            at += 1
        plain = at
    return found + _plain(text, rows[plain:])


def _fence(text: str, rows: list[Range], at: int, scanner: Scanner) -> Region | None:
    start, end = rows[at]
    line = text[start:end].strip(_BEFORE_FENCE)
    opening = _FENCE.match(line)
    # Backquotes behind the opening ones: a span of code in a sentence.
    if opening is None or "`" in line[opening.end() :]:
        return None
    fence = opening[0]
    for i in range(at + 1, len(rows)):
        line = text[slice(*rows[i])].lstrip(_BEFORE_FENCE).rstrip()
        if line.startswith(fence) and not line.strip(fence[0]):
            body = (end, rows[i][0])
            return Region("fence", start, rows[i][1], body, _whole_json(text, body, scanner))
    return Region("fence", start, rows[-1][1], (end, rows[-1][1]))


def _whole_json(text: str, body: Range, scanner: Scanner) -> JsonNode | None:
    first = body[0] + len(text[slice(*body)]) - len(text[slice(*body)].lstrip())
    node = scanner.at(first)
    return node if node and not text[node.end : body[1]].strip() else None


def _json(text: str, rows: list[Range], at: int, scanner: Scanner) -> Region | None:
    """JSON that begins and ends lines, or stands there behind a name or within a tag."""
    start, end = rows[at]
    line = text[start : min(end, start + _AROUND_JSON_CHARS)]
    first = next((i for i, char in enumerate(line) if char in "{["), -1)
    if first < 0 or (line[:first].strip() and not _BEFORE_JSON.match(line, 0, first)):
        return None
    node = scanner.at(start + first)
    if node is None or node.end - node.start < _JSON_CHARS:
        return None
    stop = text.find("\n", node.end) + 1 or len(text)
    if stop - node.end > _AROUND_JSON_CHARS or not _AFTER_JSON.match(text, node.end, stop):
        return None
    return Region("json", start, stop, (start, stop), node)


def _table(text: str, rows: list[Range], at: int) -> Region | None:
    """A Markdown table, or lines that all have the same number of one separator."""
    if at + 1 < len(rows) and "|" in text[slice(*rows[at])] and _is_rule(text[slice(*rows[at + 1])]):
        last = at + 2
        while last < len(rows) and "|" in text[slice(*rows[last])]:
            last += 1
        head = rows[at + 1][1]
        return Region("table", rows[at][0], rows[last - 1][1], (head, rows[last - 1][1]))
    first = _line(text, rows[at])
    for separator in _SEPARATORS:
        count = first.count(separator)
        if count < (1 if separator == "\t" else 2) or first.rstrip().endswith((".", "{", "(", ";", ",")):
            continue
        if _is_code(first):
            return None
        last = at
        while last < len(rows) and _row(_line(text, rows[last]), separator, count):
            last += 1
        if last - at >= _TABLE_ROWS:
            return Region("table", rows[at][0], rows[last - 1][1], (rows[at][1], rows[last - 1][1]))
    return None


def _is_rule(line: str) -> bool:
    return bool(_RULE.match("".join(line.split())))


def _row(line: str, separator: str, count: int) -> bool:
    """True for a line that may be a table row: an indented line belongs to something else."""
    if line.count(separator) != count or len(line) >= _TABLE_ROW_CHARS:
        return False
    return not line[:1].isspace() and not _NUMBER.match(line)


def unnumbered(rows: list[str]) -> list[str]:
    """Lines without the numbers that tools put in front of each; as they are if one has none."""
    numbers = [_NUMBER.match(row) for row in rows]
    if not all(number or not row.strip() for number, row in zip(numbers, rows, strict=True)):
        return rows
    return [row[number.end() :] if number else row for number, row in zip(numbers, rows, strict=True)]


def _is_code(line: str) -> bool:
    first, last = _CODE_LINE_CHARS
    if len(line) > first + last:
        line = line[:first] + line[-last:]
    return bool(_CODE_LINE.match(" ".join(line.split())))


def _plain(text: str, rows: list[Range]) -> list[Region]:
    """Prose and code that nothing marks: paragraphs, of which neighbours of the same kind are joined."""
    found: list[Region] = []
    for start, end, kind in _paragraphs(text, rows):
        if found and found[-1].kind == kind:
            start = found.pop().start
        found.append(Region(kind, start, end, (start, end)))
    return found


def _paragraphs(text: str, rows: list[Range]) -> Iterator[tuple[int, int, Kind]]:
    previous: Kind = "prose"
    for paragraph in _by_blank_lines(text, rows):
        start, end = paragraph[0][0], paragraph[-1][1]
        lines = unnumbered([line for span in paragraph if (line := _line(text, span)).strip()])
        codey = sum(_is_code(line) for line in lines)
        # A function's blank lines part what is indented under it.
        inside = previous == "code" and all(line.startswith(("  ", "\t")) for line in lines)
        enough = len(lines) >= _CODE_LINES or previous == "code"
        previous = "code" if inside or (enough and codey > _CODE_SHARE * len(lines)) else "prose"
        yield start, end, previous


def _by_blank_lines(text: str, rows: list[Range]) -> Iterator[list[Range]]:
    """Lines in groups; blank lines belong to the group before them."""
    group: list[Range] = []
    for before, row in itertools.pairwise([(0, 0), *rows]):
        blank_before = before[1] > before[0] and not text[slice(*before)].strip()
        if group and blank_before and text[slice(*row)].strip():
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _line(text: str, row: Range) -> str:
    return text[row[0] : row[1]].rstrip("\r\n")
