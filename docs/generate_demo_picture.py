"""Write two pictures of a real `make demo` into docs/pictures: `python docs/generate_demo_picture.py`.

It runs `make demo` in a pseudo-terminal (two to four minutes). demo.svg is the screen at the end; gain.svg
has two bars: how long the first token of the shared prompt took together, and alone.
`--keep FILE` also saves the bytes that the terminal received; `--from FILE` draws such bytes without a run.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import pexpect

REPO = Path(__file__).resolve().parents[1]
PICTURE = Path(__file__).parent / "pictures" / "demo.svg"
GAIN = PICTURE.with_name("gain.svg")
COMMAND = "make demo"
LIMIT_S = 1200
# Wide enough for the demo's lines; the tables of fleetctl fit themselves to it.
COLUMNS = 104
LARGEST_BYTES = 60_000

# Sizes in the picture's own units. The cell is as wide as common monospaced fonts have it at this size.
FONT_SIZE = 13
CELL_WIDTH = 7.8
LINE_HEIGHT = 18
MARGIN = 16
TITLE_HEIGHT = 34

GROUND, BAR, EDGE, PLAIN, FAINT = "#16181d", "#24272e", "#3a3f4a", "#d7dae0", "#868d9b"
BUTTONS = ("#ec6a5e", "#f4bf4f", "#61c554")
# The terminal's eight colours, by the last digit of their code.
COLOURS = ("#5c6370", "#e8737d", "#8fc379", "#e0bb6f", "#69aef0", "#c58ae0", "#5cbcc8", "#e6e8ec")

# What the demo says of its last two answers, and of what they show.
_TIMED = re.compile(r"^ +(together|alone) +first token after ([\d.]+) s · ([\d,]+) tokens", re.MULTILINE)
_VERDICT = re.compile(r"the first token came [\d.]+ times as fast; the answers are identical")
_PIECE = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<verb>[A-Za-z])|\x1b[^\[]|(?P<text>.)", re.DOTALL)


@dataclass(frozen=True)
class Style:
    """How one cell is drawn."""

    colour: int | None = None
    bold: bool = False
    faint: bool = False

    def changed(self, code: int) -> Style:
        """The style after one number of a colour sequence. Unknown numbers change nothing."""
        if code == 0:
            return Style()
        if code in (1, 2):
            return replace(self, bold=True) if code == 1 else replace(self, faint=True)
        if code == 22:
            return replace(self, bold=False, faint=False)
        if code == 39:
            return replace(self, colour=None)
        if 30 <= code <= 37 or 90 <= code <= 97:
            return replace(self, colour=code % 10)
        return self

    def attributes(self) -> str:
        """The attributes of a tspan in this style."""
        fill = FAINT if self.faint else None if self.colour is None else COLOURS[self.colour]
        weight = ' font-weight="bold"' if self.bold else ""
        return (f' fill="{fill}"' if fill else "") + weight


Cell = tuple[str, Style]


@dataclass
class Screen:
    """What the demo uses of a terminal: text, colours, return to a line's start, erase to its end."""

    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    style: Style = field(default_factory=Style)
    column: int = 0

    def write(self, text: str) -> None:
        for piece in _PIECE.finditer(text):
            if piece["text"] is not None:
                self._character(piece["text"])
            elif piece["verb"] == "m":
                for code in (piece["arguments"] or "0").split(";"):
                    self.style = self.style.changed(int(code or 0))
            elif piece["verb"] == "K":
                del self.lines[-1][self.column :]

    def _character(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.lines.append([])
            self.column = 0
        elif character.isprintable():
            line = self.lines[-1]
            line.extend([(" ", Style())] * (self.column - len(line)))
            line[self.column : self.column + 1] = [(character, self.style)]
            self.column += 1


def record() -> str:
    """Run the demo and return all that it wrote to its terminal. Raises SystemExit if it fails."""
    environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "MAKEFLAGS")}
    # The demo shows its temporary folder: this one has the same short name on every system.
    environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "TMPDIR": "/var/tmp"}  # noqa: S108
    terminal = pexpect.spawn(
        COMMAND, cwd=str(REPO), env=environ, dimensions=(200, COLUMNS), encoding="utf-8", timeout=LIMIT_S
    )
    terminal.expect(pexpect.EOF)
    terminal.close()
    text = str(terminal.before)
    if terminal.exitstatus != 0:
        raise SystemExit(f"{text}\n`{COMMAND}` ended with exit status {terminal.exitstatus}: no picture")
    return text


def draw(text: str) -> str:
    """The picture of a terminal that received ``text``."""
    screen = Screen()
    screen.write(f"\x1b[2m$\x1b[0m \x1b[1m{COMMAND}\x1b[0m\r\n{text.rstrip()}")
    columns = max(COLUMNS, *(len(line) for line in screen.lines))
    width = round(2 * MARGIN + columns * CELL_WIDTH)
    top = TITLE_HEIGHT + MARGIN + FONT_SIZE
    height = TITLE_HEIGHT + 2 * MARGIN + len(screen.lines) * LINE_HEIGHT
    buttons = "".join(
        f'<circle cx="{MARGIN + 6 + 20 * place}" cy="{TITLE_HEIGHT / 2:g}" r="6" fill="{colour}"/>'
        for place, colour in enumerate(BUTTONS)
    )
    rows = "\n".join(
        f'<text y="{top + row * LINE_HEIGHT}">{_spans(line)}</text>'
        for row, line in enumerate(screen.lines)
        if line
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>A terminal after `{COMMAND}`</title>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" fill="{GROUND}" stroke="{EDGE}"/>
<path d="M1 {TITLE_HEIGHT}V9.5A8.5 8.5 0 0 1 9.5 1H{width - 9.5}A8.5 8.5 0 0 1 {width - 1} 9.5V{TITLE_HEIGHT}Z" fill="{BAR}"/>
{buttons}
<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="{FONT_SIZE}"
 fill="{PLAIN}" style="white-space:pre" xml:space="preserve">
<text x="{width / 2:g}" y="{TITLE_HEIGHT / 2 + 4.5:g}" text-anchor="middle" fill="{FAINT}">{COMMAND}</text>
{rows}
</g>
</svg>
"""  # noqa: E501


@dataclass(frozen=True)
class Gain:
    """Seconds to the first token of the demo's shared prompt, and the tokens that it has."""

    together_s: float
    alone_s: float
    tokens: int

    @property
    def times(self) -> float:
        return self.alone_s / self.together_s


def gain(text: str) -> Gain:
    """What a run of the demo showed. Raises SystemExit if it was slower together, or its answers differ."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)
    timed = {
        name: (float(seconds), int(tokens.replace(",", "")))
        for name, seconds, tokens in _TIMED.findall(plain)
    }
    if set(timed) != {"together", "alone"} or not _VERDICT.search(plain):
        raise SystemExit("this run of the demo shows no gain: no picture")
    return Gain(timed["together"][0], timed["alone"][0], timed["alone"][1])


def draw_gain(shown: Gain) -> str:
    """Two bars, one below the other, as long as the seconds that they stand for."""
    left, room, width, height = 150, 470, 760, 150
    bars = []
    for row, (name, seconds, colour) in enumerate(
        (("one machine", shown.alone_s, COLOURS[0]), ("two machines", shown.together_s, COLOURS[2]))
    ):
        y = 52 + 42 * row
        length = room * seconds / shown.alone_s
        bars.append(
            f'<text x="{left - 12}" y="{y + 18}" text-anchor="end">{name}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="26" rx="4" fill="{colour}"/>'
            f'<text x="{left + length + 10:.1f}" y="{y + 18}" font-weight="bold">{seconds:.1f} s</text>'
        )
    words = f"{shown.times:.2f} times as soon, and the same answer"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{shown.tokens:,} tokens: first token after {shown.together_s:.1f} s on two machines, {shown.alone_s:.1f} s on one</title>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" fill="{GROUND}" stroke="{EDGE}"/>
<g font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="15" fill="{PLAIN}">
<text x="{MARGIN}" y="30" fill="{FAINT}">Until the first word about {shown.tokens:,} tokens · {COMMAND}, each machine is one CPU core</text>
{bars[0]}
{bars[1]}
<text x="{width - MARGIN}" y="{height - 8}" text-anchor="end" font-size="13" fill="{COLOURS[2]}">{words}</text>
</g>
</svg>
"""  # noqa: E501


def _spans(line: list[Cell]) -> str:
    """One tspan per run of cells in one style, without the blanks around its text.

    Each has its own place and length, so columns stand right in any font.
    """
    spans = []
    column = 0
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in cells)
        for part in re.finditer(r"\S+(?: \S+)*", text):
            left = MARGIN + (column + part.start()) * CELL_WIDTH
            length = len(part[0]) * CELL_WIDTH
            spans.append(
                f'<tspan x="{left:g}" textLength="{length:g}"{style.attributes()}>{escape(part[0])}</tspan>'
            )
        column += len(text)
    return "".join(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a real `make demo`.")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="save what the terminal received")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="draw this instead of a run")
    options = parser.parse_args()
    text = options.source.read_bytes().decode() if options.source else record()
    if options.keep:
        options.keep.write_bytes(text.encode())
    picture = draw(text)
    if len(picture.encode()) > LARGEST_BYTES:
        raise SystemExit(f"the picture has {len(picture.encode())} bytes, more than {LARGEST_BYTES}")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")
    GAIN.write_text(draw_gain(gain(text)), encoding="utf-8")


if __name__ == "__main__":
    main()
