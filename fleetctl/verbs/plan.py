"""`fleetctl plan`: the ways to answer a prompt with their times, and the drafts of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.replies import read
from fleetctl.placement import named_machines
from fleetctl.render.added_page import added_page
from fleetctl.render.columns import Column, drawn, fitted, terminal_width
from fleetctl.render.group_table import group_lines
from fleetctl.render.options_table import options_table
from fleetctl.render.plan_words import division, drafts_line, local_s, prompt
from fleetctl.render.text import brief, one_line, size, wrapped
from fleetctl.text_files import read_text
from fleetd.control.prefill_plan import AddedView, KnownMachines, PlanView, StepView

# Of a prompt that is not named.
_TOKENS = 1000
# step_names.PULLED, whose module is not loaded here.
_PULLED = "pulled"
_GUESS = (
    "The files of {} are fetched first. The time is a guess for that alone: how fast they come, and how fast"
    " the prompt is read, is not known yet."
)


@click.command("plan")
@click.argument("file", required=False)
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="One of `fleetctl models`, if not the default.",
    shell_complete=completion.models,
)
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="A prompt of so many tokens.")
@click.option(
    "--on",
    metavar="A,B,…",
    default="",
    help="As if these machines were to hold the model together; this one is the first of them.",
)
@click.option(
    "--cached",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="So many of these tokens are known here already.",
)
@click.option("--smart", is_flag=True, help="As if smart prefill were asked for.")
@click.option(
    "--ratio",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="The same, keeping this share of the tokens.",
)
@click.option(
    "--with",
    "machine",
    metavar="MACHINE",
    help="What one more machine would give, as 'Mac mini M4, 16 GB'; list names those that are known.",
)
@click.option(
    "--link",
    type=click.Choice(["wired", "wifi", "thunderbolt"]),
    default="wired",
    help="How that machine would be connected; wired is gigabit Ethernet.",
)
@json_option
@pass_session
def command(
    session: CliSession,
    file: str | None,
    model: str,
    tokens: int | None,
    on: str,
    cached: int,
    smart: bool,
    ratio: float | None,
    machine: str | None,
    link: str,
) -> None:
    """Show how a prompt would be answered, and why so.

    The prompt is the text in FILE (- is stdin), or any one with --tokens; with a model alone it has 1,000
    tokens. If several machines are to hold the model, it says who holds what. Nothing is computed or loaded:
    these are the prices by which a request would be placed now, and who would draft for its answer.
    `fleetctl trace` shows what came of past ones. With --with no prompt is named: the times are those of
    prompts of many lengths, modelled, with one machine more.
    """
    if machine is not None:
        if file is not None or tokens is not None:
            raise click.UsageError("--with shows prompts of many lengths: leave FILE and --tokens out.")
        _with_machine(session, model, machine, link)
        return
    if file is None and tokens is None and model:
        tokens = _TOKENS
    if (file is None) == (tokens is None):
        raise click.UsageError("Give a FILE (- is stdin), --tokens, a model or --with.")
    body: dict[str, Any] = {"model": model, "cached": cached}
    if on:
        body["placement"] = named_machines(on)
    body |= {"tokens": tokens} if file is None else {"text": read_text(file)}
    if smart or ratio:
        body["smart"] = ratio or 0
    found = session.client().post("/fleet/v1/plan", body)
    estimated = file is not None
    session.emit(found, lambda: render(read(found, PlanView), terminal_width(), estimated=estimated))


def _with_machine(session: CliSession, model: str, machine: str, link: str) -> None:
    client = session.client()
    if machine.strip().lower() == "list":
        known = client.get("/fleet/v1/plan/machines")
        session.emit(known, lambda: "\n".join(read(known, KnownMachines).machines))
        return
    body = {"model": model, "machine": machine, "link": link}
    found = client.post("/fleet/v1/plan/added", body)
    session.emit(found, lambda: added_page(read(found, AddedView), terminal_width()))


def render(plan: PlanView, width: int | None, *, estimated: bool = False) -> str:
    """The whole page; ``width`` None is for files and pipes, where nothing is cut.

    ``estimated``: the tokens were counted roughly, from a text.
    """
    asked = ("about " if estimated else "") + prompt(plan.prompt_tokens, plan.cached_tokens)
    parts = [wrapped(f"{one_line(plan.model)} · a prompt of {asked}", width)]
    if plan.group is not None:
        parts.append("\n".join(group_lines(plan.group, width)))
    if not plan.options and plan.group is not None:
        return "\n\n".join(parts)
    if not plan.options:
        return f"{parts[0]}\n\nThere is no way to compute it."
    parts.append("\n".join(options_table(plan.options, local_s(plan.options), width)))
    chosen = next((option for option in plan.options if option.chosen), None)
    if chosen is not None and chosen.steps:
        parts.append("\n".join([wrapped(f"* {division(chosen)}", width), *_steps(chosen.steps, width)]))
        if any(step.name == _PULLED for step in chosen.steps):
            parts.append(wrapped(_GUESS.format(one_line(plan.model)), width))
    parts += [wrapped(one_line(sentence), width) for sentence in plan.capped]
    if plan.drafts is not None:
        parts.append(wrapped(drafts_line(plan.drafts), width))
    return "\n\n".join(parts)


def _steps(steps: Sequence[StepView], width: int | None) -> list[str]:
    columns = [
        Column("", [f"  {one_line(step.name)}" for step in steps], 9),
        Column("", [one_line(step.machine) for step in steps], 8),
        Column("", [brief(step.seconds) for step in steps], 9, right=True),
        Column("", [size(step.n_bytes) if step.n_bytes else "" for step in steps], 3, right=True),
    ]
    return drawn(fitted(columns, width))[1:]
