"""What was found → docs/quality.md and its plots. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bench import staleness
from eval import plots, rounded
from eval.kept_facts import FORMS, RATIOS, THIRDS, UNASKED_FORMS, UNASKED_RATIOS, KeptFacts
from eval.requests import BEHIND, GATE, IN_FRONT, Declined, table
from eval.rounded import RoundedAnswers
from eval.runs import Outcome, compared, dense, form_names, kept, recall, unbroken
from eval.statistics import Ratio, Share
from eval.tried_voices import Told

_HEAD = """\
# Quality of smart prefill

Written by `make eval`. What is dropped from a prompt may be what its answer needs; here is how often.

Only answers that the model gives when it reads the whole prompt are counted: a share of 100 % means that
nothing was lost by shortening. Behind each share stand its 95 % interval (Wilson) and the number of answers.
*text* is the shortened prompt with its markers, *sparse* the same selection at its original places in the
cache. For comparison, with the same budget: *words* selects by the question's words without a model,
*random* keeps units at random, *truncated* the end of the prompt; what is always kept (the question, the
head) is kept there too.

Of several needles a small model finds some, and which ones is chance. The promise is strict all the same:
each answer that the whole prompt gives has to be there. Beside it stands how many answers a form gives for
each that the whole prompt gives, over all prompts, with an interval by bootstrap: it shows whether what is
missing is lost or is another one."""

_ALWAYS = """\
## What is always kept

System prompts and tools, examples in front of a talk, the last user turn (of a long pasted text what asks at
its ends), the first and the last tokens, tool calls, and whatever stands between `<fleet:keep>` and
`</fleet:keep>`; the model never sees these marks. No message is left out, and what is left of a message is
whole paragraphs, statements, values and rows: fences are closed, tables have their header, JSON can be
parsed."""

_NAMES = {
    "single": "one needle",
    "distractors": "one needle, three alike",
    "needles4": "four needles",
    "needles8": "eight needles",
    "hop": "two hops",
    "dialogue": "told turns ago",
    "code": "a function's value",
    "json": "a record in a tool's result",
    "table": "a row of a table",
    "aggregate": "about the whole text",
    "verbatim": "word for word",
}


# Where a request stands, by the gate's rows: each way is one in which people ask.
_STANDS = {
    GATE: "a message of their own",
    BEHIND: "in one message behind the text",
    IN_FRONT: "in one message in front of the text",
}


class MeasuredAt(msgspec.Struct, frozen=True):
    """When a command was run, and at which commit; "" if none was kept."""

    date: str
    commit: str


class Results(msgspec.Struct):
    """Everything that was found. Pairs are (hits, of). ``commands``: of which a later one may have replaced
    what an earlier one found; ``date`` and ``machine`` are the last one's, ``measured`` is each one's."""

    commands: list[str]
    date: str
    machine: list[str]
    model: str
    quick: bool
    seconds: float = 0.0
    scored: bool = True
    sparse: bool = True
    outcomes: list[Outcome] = []
    declined: dict[str, tuple[int, int]] = {}
    layers: list[tuple[int, int, int, float]] = []
    segments: list[tuple[int, int, int]] = []
    requests: list[Declined] = []
    tuned: list[Declined] = []
    tried: dict[str, Told] = {}
    profile: str = ""
    facts: list[KeptFacts] = []
    unasked: list[KeptFacts] = []
    rounded: list[RoundedAnswers] = []
    perplexity: dict[str, dict[str, float]] = {}
    measured: dict[str, MeasuredAt] = {}


# Kinds of long texts of which several facts must be kept at once.
_SEVERAL = ("four needles", "eight needles", "four values of a key")

_LONG = """\
## Long texts

Facts that selection keeps, word for word, of texts with at least 40 facts of each kind (of tables and JSON as
many as have room); no answer is generated. Kinds share a text: sentences from templates and the documentation
that Python ships, a run of each in turn, or tables, JSON and code one behind the other. *n* counts facts.
*ratio* is the share of the tokens that may be kept. Beside the share at each ratio stand, for a ratio of 0.1,
its thirds by place in the text, and what others keep in the same room: *BM25* by the question's words alone,
*the end* and *random*. Questions for which nothing was selected are left out: the whole text would be read.
*passes*: in how many pieces the scorer read the text.

Where much is lost, and why. Questions that share no word with their facts, and descriptions of bugs, leave
only attention to find the place, and a scorer of this size knows few other words for a thing. Of two hops
and of variables that are passed on, attention finds what the question names; the next steps are found by
names that lead from sentence to sentence, and have half of the room."""


_UNASKED = """\
## Without a question

Facts that selection keeps, word for word, of texts that nobody asks about (`without_question`): all of the
facts that may be asked for later count. *surprise* keeps what the model did not expect, as smart
prefill does. *Rare words* needs no model: it looks at how often a word stands in the text. *ratio* is the
share of the tokens that may be kept."""

_ROUNDED = """\
## What other arithmetic costs

Answers to the whole prompt that are right, of those that are right if the model runs on one machine alone.
*same* is the share of tasks whose answers are the same, token by token. Kinds that this model hardly answers
(code, JSON, tables) are left out.

In the first three forms another machine takes part; such answers are labelled `equivalent`. A stand-in
rounds hidden states, keys and values to bfloat16 after each of its layers. *routed*: it answers. *by layers*:
it computes the first half of the layers of the prompt. *by tokens*: it computes the first half of the prompt.

In *8 bits* and *4 bits* this machine is alone; keys and values are held in so many (`models.kv_bits`)."""

_BITS = """\
Perplexity of texts that stay whole, weights and products in float32, by how keys and values are held."""


class Bar(msgspec.Struct, frozen=True):
    """A promise: the share of some cells that must be reached. ``steps``: what measured these."""

    said: str
    share: Share | Ratio
    least: float
    steps: tuple[str, ...]


def bars(results: Results) -> list[Bar]:
    found = []
    ours = [form for form in ("text", "sparse") if any(form in o.forms for o in results.outcomes)]
    lengths = sorted({o.tokens for o in results.outcomes if o.kind == "single"})
    good = [n for n in lengths if dense(_one_ratio(results, "single", n)).value >= 0.9]
    for tokens in sorted({*lengths[:1], *good[-1:]}):
        for ratio, least in ((0.25, 0.97), (0.1, 0.90)):
            for form in ours:
                mine = _cell(results, "single", tokens, ratio)
                if mine:
                    said = f"One needle, {tokens} tokens, ratio {ratio}, {form}"
                    found.append(Bar(said, recall(mine, form), least, (f"single-{tokens}",)))
    for form in ours:
        mine = [o for o in results.outcomes if o.kind in ("needles4", "needles8") and o.ratio == 0.3]
        if mine:
            kinds = " and ".join(name for kind, name in _NAMES.items() if any(o.kind == kind for o in mine))
            said = f"{kinds.capitalize()}, ratio 0.3, {form}"
            steps = tuple(sorted({f"{o.kind}-{o.tokens}" for o in mine}))
            found.append(Bar(f"{said}, of the whole prompt's own answers", recall(mine, form), 0.95, steps))
            found.append(
                Bar(f"{said}, as many answers as the whole prompt", compared(mine, form), 0.95, steps)
            )
    for several, of_kinds, least in (
        ("One needle", ("one needle",), 0.97),
        ("Several needles", _SEVERAL, 0.95),
    ):
        for tokens in sorted({cell.tokens for cell in results.facts}):
            cells = [cell for cell in results.facts if (cell.tokens, cell.ratio) == (tokens, 0.3)]
            share = sum((cell.share("scores") for cell in cells if cell.kind in of_kinds), Share(0, 0))
            if share.of:
                said = f"{several}, {tokens} tokens, ratio 0.3, facts kept"
                found.append(Bar(said, share, least, (f"facts-{tokens}",)))
    for kind in ("aggregate", "verbatim"):
        if kind in results.declined:
            said = f"Declined: {_NAMES[kind]}"
            found.append(Bar(said, Share(*results.declined[kind]), 0.95, ("gate",)))
    rows = {row.by: row for row in results.requests}
    for by, stands in _STANDS.items():
        if by in rows:
            (hits, of), said = rows[by].part, f"Requests in five languages, {stands}"
            whole = Share(*rows[by].whole)
            found.append(Bar(f"{said}, the whole text: declined", whole, 0.95, ("gate",)))
            found.append(Bar(f"{said}, a part: not declined", Share(of - hits, of), 0.95, ("gate",)))
    return found


class Ages:
    """When steps were measured. ``later``: by commit, how many later ones touched what is measured."""

    def __init__(self, results: Results, later: Mapping[str, int | None]) -> None:
        self._results = results
        self._later = later
        self._last = MeasuredAt(results.date, staleness.measured_at(results.machine))

    def at(self, command: str) -> MeasuredAt:
        return self._results.measured.get(command, self._last)

    def later(self, at: MeasuredAt) -> int | None:
        return self._later.get(at.commit)

    def of(self, *steps: str) -> str:
        """The day of the last command for these steps, of the oldest if there are several, and how many later
        commits touched what it measures."""
        known = [[each for each in self._results.commands if _runs(each, step)] for step in steps]
        found = [self.at(commands[-1]) for commands in known if commands]
        if not found:
            return "not known"
        oldest = min(found, key=lambda at: at.date)
        return f"{oldest.date} ({staleness.briefly(self.later(oldest))})"


def _runs(command: str, step: str) -> bool:
    """True if a command runs a step: it names it, or it names none and runs all."""
    names = command.partition(" --")[0].split()[3:]
    return step in names or not names


def profile_said(heads: int, layers: int) -> str:
    asked = "1 head" if heads == 1 else f"{heads} heads"
    return f"{asked} of the model {'is' if heads == 1 else 'are'} asked, in its first {layers} layers."


def page(results: Results, later: Mapping[str, int | None], scorer_now: str = "") -> str:
    """The page.

    Args:
        later: by commit, how many later ones touched what is measured.
        scorer_now: how the model scores today, as ``Results.profile`` says it; "" if that is not known.
    """
    ages = Ages(results, later)
    parts = [
        _HEAD,
        "Beside each figure stands when it was measured, and how many later commits touched what it "
        "measures. What is not *current* may be another figure today.",
        "\n".join(_summary(results, ages)),
        "## By task\n\n" + "\n".join(_table(results, ages)),
    ]
    parts.append("## The gate\n\n" + "\n".join(_gate(results, ages)))
    if results.segments or results.layers:
        parts.append("## The scorer\n\n" + "\n".join(_scorer(results, ages, scorer_now)))
    if results.facts:
        parts.append(_LONG + "\n\n" + "\n".join(_long(results.facts, ages)))
    if results.unasked:
        parts.append(_UNASKED + "\n\n" + "\n".join(_unasked(results.unasked, ages)))
    if results.rounded:
        parts.append(
            f"{_ROUNDED}\n\nMeasured on {ages.of('shared')}.\n\n" + "\n".join(_rounded(results.rounded))
        )
    if results.perplexity:
        parts.append("\n".join(_perplexity(results.perplexity, ages)))
    parts.append("\n".join(_plots(results)))
    parts.append(_ALWAYS)
    parts.append("## How\n\n" + "\n".join(_how(results, ages)))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def pictures(results: Results) -> dict[str, str]:
    """SVG by file name."""
    found = {}
    for name, kind, ratio in (("quality-length", "single", 0.25), ("quality-length-tenth", "single", 0.1)):
        series = _over_length(results, kind, ratio)
        if series:
            title = f"One needle, ratio {ratio}: share of dense answers"
            found[f"{name}.svg"] = plots.lines(title, "tokens", "recall", series)
    series = _over_depth(results)
    if series:
        found["quality-depth.svg"] = plots.lines(
            "One needle by its depth (all lengths, both ratios)", "depth of the needle", "recall", series
        )
    if results.layers:
        points = [
            (float(layer), Share(hits, of).value, *Share(hits, of).interval)
            for layer, hits, of, _ in results.layers
        ]
        found["quality-layers.svg"] = plots.lines(
            "Facts kept at ratio 0.1 by the layer that scoring ends at",
            "layers run",
            "facts kept",
            {"kept": points},
        )
    return found


def _summary(results: Results, ages: Ages) -> Iterator[str]:
    yield "| promised | bar | measured | | on |"
    yield "|---|---|---|---|---|"
    for bar in bars(results):
        verdict = "pass" if bar.share.value >= bar.least else "**falls short**"
        verdict = "quick look" if results.quick else verdict
        on = ages.of(*bar.steps)
        yield f"| {bar.said} | ≥ {100 * bar.least:.0f} % | {bar.share} | {verdict} | {on} |"


def _table(results: Results, ages: Ages) -> Iterator[str]:
    shown = form_names(results.outcomes)
    yield (
        "*kept* is the share of the tokens that selection keeps, *as text* what the shortened prompt has of "
        "the whole one with its markers, *dense* the share that the whole prompt answers. *Facts kept* and "
        "*intact* are of all prompts, answered or not: a conversation is intact if its calls, roles and "
        "names are as they were, what was JSON can be parsed, and fences are closed.\n"
    )
    columns = ["task", "tokens", "ratio", "kept", "as text", "dense", "facts kept", "intact", *shown, "on"]
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|---|" + "---|" * (len(shown) + 1)
    for kind, tokens, ratio in sorted(
        {(o.kind, o.tokens, o.ratio) for o in results.outcomes},
        key=lambda cell: (list(_NAMES).index(cell[0]), cell[1], -(cell[2] or 9)),
    ):
        mine = _cell(results, kind, tokens, ratio)
        answered = [o for o in mine if o.forms]
        ratios = [o.kept_ratio for o in mine if o.facts]
        mean = f"{100 * sum(ratios) / len(ratios):.0f} %" if ratios else ""
        shares = " | ".join(str(recall(mine, form)) for form in shown)
        whole = sum(o.prompt_tokens for o in answered)
        said = f"{100 * sum(o.text_tokens for o in answered) / whole:.0f} %" if whole else ""
        yield (
            f"| {_NAMES[kind]} | {tokens} | {ratio or 'adaptive'} | {mean} | {said} | {dense(mine)} "
            f"| {kept(mine)} | {unbroken(mine)} | {shares} | {ages.of(f'{kind}-{tokens}')} |"
        )


def _gate(results: Results, ages: Ages) -> Iterator[str]:
    yield f"Measured on {ages.of('gate')}.\n"
    if results.requests:
        yield (
            "Tasks that need all of the text are to be declined, and no questions: by requests that people "
            "could write, in five languages (`eval/data/gate`). The gate was made with others, and not "
            "changed once it was measured with these (decision 35). Behind the languages are shares of the "
            "gate; *signs* and *places* are its voices, each by itself."
        )
        yield ""
        yield from table(results.requests)
        yield ""
        of = results.tuned[0]
        yield f"Of the requests that it was made with, it declines {Share(*of.whole)} and {Share(*of.part)}."
        yield ""
    if results.tried:
        yield (
            "Evidence that costs a model, and that the gate does without; *area* is how often a question "
            "gets a higher value than a task for the whole text (0.5 tells nothing). *The gate's* is that "
            "of its own evidence, *both* of the two together, at the weight that is best for these requests. "
            f"Measured on {ages.of('verdict', 'peaks')}:"
        )
        yield ""
        yield "| evidence | requests | area | questions declined with 95 % of the tasks | the gate's | both |"
        yield "|---|---|---|---|---|---|"
        for voice, told in results.tried.items():
            figures = f"{told.area:.2f} | {100 * told.questions:.0f} % | {told.gate:.3f} | {told.both:.3f}"
            yield f"| {voice} | {told.of} | {figures} |"
        yield ""
    yield "By generated tasks:"
    yield ""
    yield "| task | declined |"
    yield "|---|---|"
    for kind, (hits, asked) in results.declined.items():
        yield f"| {_NAMES[kind]} | {Share(hits, asked)} |"


def _scorer(results: Results, ages: Ages, now: str) -> Iterator[str]:
    if results.profile:
        yield f"{results.profile} So it was on {ages.of('segments', 'layers')}.\n"
    if now and now != results.profile:
        yield f"**The profile is another one today.** {now}\n"
    if results.segments:
        yield (
            "Segments that are scored apart and merged; facts kept at ratio 0.1, measured on "
            f"{ages.of('segments')}:\n"
        )
        yield "| segments | facts kept |"
        yield "|---|---|"
        for segments, hits, of in results.segments:
            yield f"| {segments} | {Share(hits, of)} |"
        yield ""
    if results.layers:
        yield f"The layer at which scoring ends, measured on {ages.of('layers')}:\n"
        yield "| layers run | facts kept | seconds per prompt |"
        yield "|---|---|---|"
        for layer, hits, of, seconds in results.layers:
            yield f"| {layer} | {Share(hits, of)} | {seconds:.2f} |"


def _plots(results: Results) -> Iterator[str]:
    for name in pictures(results):
        yield f"![{name.removesuffix('.svg')}](quality/{name})\n"


def _how(results: Results, ages: Ages) -> Iterator[str]:
    yield (
        "Haystacks are sentences of six genres from templates, places, names and a seed; two genres and all "
        "seeds here were not used when weights were chosen. Each seed puts its fact at another depth. "
        "Questions about a text end with how their answer begins, because a small model goes on from there, "
        "where it would otherwise go on with the text; the others are conversations. "
        "Answers are greedy; one counts if the answer stands in it as a word of its own. Lengths are those "
        "of the haystack, in tokens of the model."
    )
    yield ""
    if not results.scored:
        yield "The worker did not score: selection went by the question's words alone.\n"
    if not results.sparse:
        yield "The worker did not take sparse prompts.\n"
    quick = " (a quick look, not a measurement)" if results.quick else ""
    minutes = f"{results.seconds / 60:.0f} minutes"
    yield "| command | measured on | commit | later commits that touched what it measures |"
    yield "|---|---|---|---|"
    for command in results.commands:
        at = ages.at(command)
        later = ages.later(at)
        yield (
            f"| `{command}` | {at.date} | {f'`{at.commit}`' if at.commit else 'not kept'} "
            f"| {'cannot be told' if later is None else later} |"
        )
    yield ""
    yield f"All together {minutes}{quick}, {results.model}.  "
    yield "; ".join(results.machine) + "."


def _cell(results: Results, kind: str, tokens: int, ratio: float) -> list[Outcome]:
    return [o for o in results.outcomes if (o.kind, o.tokens, o.ratio) == (kind, tokens, ratio)]


def _one_ratio(results: Results, kind: str, tokens: int) -> list[Outcome]:
    """Each task once, though it ran at several ratios."""
    mine = [o for o in results.outcomes if (o.kind, o.tokens) == (kind, tokens)]
    return [o for o in mine if o.ratio == mine[0].ratio]


def _over_length(results: Results, kind: str, ratio: float) -> dict[str, list[plots.Point]]:
    lengths = sorted({o.tokens for o in results.outcomes if o.kind == kind and o.ratio == ratio})
    found: dict[str, list[plots.Point]] = {}
    for form in form_names([o for o in results.outcomes if o.kind == kind]):
        shares = [(tokens, recall(_cell(results, kind, tokens, ratio), form)) for tokens in lengths]
        found[form] = [(float(tokens), share.value, *share.interval) for tokens, share in shares if share.of]
    return {form: points for form, points in found.items() if points}


def _over_depth(results: Results, parts: int = 5) -> dict[str, list[plots.Point]]:
    mine: Sequence[Outcome] = [o for o in results.outcomes if o.kind in ("single", "distractors") and o.ratio]
    found: dict[str, list[plots.Point]] = {}
    for form in form_names(mine):
        points = []
        for part in range(parts):
            inside = [o for o in mine if part / parts <= o.depth < (part + 1) / parts]
            share = recall(inside, form)
            if share.of:
                points.append(((part + 0.5) / parts, share.value, *share.interval))
        if points:
            found[form] = points
    return found


def _long(facts: Sequence[KeptFacts], ages: Ages) -> list[str]:
    """A row for each kind and length."""
    ratios = " | ".join(f"ratio {ratio:g}" for ratio in RATIOS)
    columns = f"| kind | tokens | passes | {ratios} | {' | '.join(THIRDS)} | {' | '.join(FORMS[1:])} | on |"
    rows = [columns, "|---" * (columns.count("|") - 1) + "|"]
    cells = {(found.kind, found.tokens, found.ratio): found for found in facts}
    for kind, tokens, ratio in cells:
        if ratio == RATIOS[0]:
            at = [str(cells[kind, tokens, ratio].share("scores")) for ratio in RATIOS]
            tenth = cells[kind, tokens, 0.1]
            beside = [
                f"{tenth.share(form).value:.0%}" if tenth.share(form).of else "none"
                for form in (*THIRDS, *FORMS[1:])
            ]
            on = ages.of(f"facts-{tokens}")
            rows.append(f"| {kind} | {tokens} | {tenth.passes} | {' | '.join([*at, *beside])} | {on} |")
    return rows


def _unasked(facts: Sequence[KeptFacts], ages: Ages) -> Iterator[str]:
    """A row for each kind and length, and one for all of them at each ratio."""
    yield f"| kind | tokens | ratio | {' | '.join(UNASKED_FORMS)} | on |"
    yield "|---" * (4 + len(UNASKED_FORMS)) + "|"
    for cell in facts:
        shares = " | ".join(str(cell.share(form)) for form in UNASKED_FORMS)
        on = ages.of(f"unasked-{cell.tokens}")
        yield f"| {cell.kind} | {cell.tokens} | {cell.ratio:g} | {shares} | {on} |"
    for ratio in UNASKED_RATIOS:
        mine = [cell for cell in facts if cell.ratio == ratio]
        sums = (sum((cell.share(form) for cell in mine), Share(0, 0)) for form in UNASKED_FORMS)
        yield f"| all | | {ratio:g} | {' | '.join(map(str, sums))} | |"


def _rounded(found: Sequence[RoundedAnswers]) -> Iterator[str]:
    """A row for each kind, and one for all."""
    forms = rounded.FORMS
    yield f"| task | tokens | right alone | {' | '.join(forms)} |"
    yield "|---" * (3 + len(forms)) + "|"
    for each in found:
        yield f"| {_NAMES[each.kind]} | {each.tokens} | {_beside_alone([each])} |"
    yield f"| all | | {_beside_alone(found)} |"


def _beside_alone(found: Sequence[RoundedAnswers]) -> str:
    """Columns of some kinds together."""
    none = Share(0, 0)
    columns = [str(sum((Share(each.right.get("alone", 0), each.answers) for each in found), none))]
    for form in rounded.FORMS:
        kept_all = sum((each.kept(form) for each in found), none)
        same = sum((each.alike(form) for each in found), none)
        columns.append(f"{kept_all}, same {same.value:.0%}" if same.of else "none")
    return " | ".join(columns)


def _perplexity(found: Mapping[str, Mapping[str, float]], ages: Ages) -> Iterator[str]:
    ways = list(next(iter(found.values())))
    yield f"\n{_BITS} Measured on {ages.of('kv-bits')}.\n"
    yield f"| text | {' | '.join(ways)} |"
    yield "|---" * (1 + len(ways)) + "|"
    for text, by_way in found.items():
        first = by_way[ways[0]]
        shown = (f"{value:.3f} ({100 * (value / first - 1):+.1f} %)" for value in list(by_way.values())[1:])
        yield f"| {text} | {' | '.join([f'{first:.3f}', *shown])} |"
