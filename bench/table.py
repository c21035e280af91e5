"""Results → docs/benchmarks.md. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench import staleness
from bench.figures import Figure, Result, written

_HEAD = """# Benchmarks

Written by `make bench` (`python -m bench NAME...` measures some families again and leaves the others as they
are). A value is the median of its runs, or the worst of them where it says so; the range of all runs stands
beside it. A ratio is formed within one run, whose sides take turns, and the median is taken of the ratios.
Absolute times belong to the machine named below each table, and where others share its processor to the hour:
how long a fixed loop took tells two such hours apart. Ratios carry over better. Beside the date of a
figure stands how many later commits had touched what it measures when the page was written;
`python -m bench --stale` counts.
"""


def page(titles: Mapping[str, str], results: Mapping[str, Result], ages: Mapping[str, int | None]) -> str:
    """The whole page: families in the order of ``titles``, those without a result named as such.

    ``ages``: of each family with a result, how many later commits touched what it measures.
    """
    parts = [_HEAD, "\n".join(_summary(titles, results, ages))]
    for family, title in titles.items():
        result = results.get(family)
        if result is None:
            parts.append(f"## {title}\n\nNot measured yet: `python -m bench {family}`.")
        else:
            parts.append("\n".join(_family(title, result, ages.get(family))))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(
    titles: Mapping[str, str], results: Mapping[str, Result], ages: Mapping[str, int | None]
) -> Iterator[str]:
    yield "| promised | bar | measured | | on |"
    yield "|---|---|---|---|---|"
    for family in titles:
        result = results.get(family)
        if result is None:
            continue
        on = f"{result.date}, {staleness.briefly(ages.get(family))}"
        for figure in result.measured.figures:
            if figure.bar is not None:
                value = written(figure.value, figure.unit)
                judged = verdict(figure, quick=result.quick)
                yield f"| {figure.title} | {bar(figure)} | {value} | {judged} | {on} |"
    missing = [f"`{family}`" for family in titles if family not in results]
    if missing:
        yield f"| not measured yet: {', '.join(missing)} | | | | |"


def _family(title: str, result: Result, age: int | None) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| figure | value | range | bar | |"
    yield "|---|---|---|---|---|"
    yield from (row(figure, quick=result.quick) for figure in result.measured.figures)
    yield ""
    yield from (f"- {figure.title}: {figure.note}" for figure in result.measured.figures if figure.note)
    yield f"\n{result.measured.how}\n"
    runs = "one run" if result.runs == 1 else f"{result.runs} runs"
    quick = " (a quick look, not a measurement)" if result.quick else ""
    if result.cut:
        yield f"Cut short ({result.cut}): what is missing was not measured.\n"
    pace = f"load average {result.load:.2f} at the start{_loop(result)}"
    yield f"`{result.command}`, {result.date}, {runs}{quick}, {pace}.  "
    yield "; ".join(result.machine) + ".  "
    yield staleness.said(age)


def _loop(result: Result) -> str:
    if not result.loop_s:
        return ""
    before, after = (f"{1000 * seconds:.0f} ms" for seconds in result.loop_s)
    return f"; a fixed loop took {before} before and {after} after"


def row(figure: Figure, *, quick: bool = False) -> str:
    """A figure's line in its family's table."""
    low, high = min(figure.values), max(figure.values)
    span = "" if len(figure.values) == 1 else f"{written(low, figure.unit)} to {written(high, figure.unit)}"
    title = f"{figure.title}, worst" if figure.of == "worst" and len(figure.values) > 1 else figure.title
    value = written(figure.value, figure.unit)
    return f"| {title} | {value} | {span} | {bar(figure)} | {verdict(figure, quick=quick)} |"


def bar(figure: Figure) -> str:
    if figure.bar is None:
        return "none"
    return f"{'≥' if figure.bar.at_least else '≤'} {written(figure.bar.value, figure.unit)}"


def verdict(figure: Figure, *, quick: bool = False) -> str:
    """Never rounded in our favour: the unrounded value is what is judged, and a quick look is not."""
    if quick and figure.bar is not None:
        return "quick look, not judged"
    return {True: "pass", False: "**falls short**", None: "as it is"}[figure.passes]


def lines(figures: Sequence[Figure]) -> str:
    """The same for a terminal."""
    width = max(len(figure.title) for figure in figures)
    return "\n".join(
        f"  {f.title:<{width}}  {written(f.value, f.unit):>12}  {bar(f):<14} {verdict(f).strip('*')}"
        for f in figures
    )
