"""`fleetctl status`: the daemon, its machine, its models and its fleet.

Reads plain JSON: loading msgspec would cost this verb a sixth of its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.render.columns import Column, drawn, fitted, terminal_width
from fleetctl.render.fleet_words import (
    OFF,
    crowd_of,
    daemon_word,
    label,
    newcomer,
    removal,
    state_word,
    summary,
)
from fleetctl.render.text import (
    clause,
    count,
    duration,
    labelled,
    layers,
    listed,
    one_line,
    rough,
    size,
    wrapped,
)

# Stages that count bytes: model_change.READING and FETCHING, whose module is not loaded here.
_IN_BYTES = frozenset({"reading", "copying", "downloading", "downloading here"})


@click.command("status")
@json_option
@pass_session
def command(session: CliSession) -> None:
    """Show the daemon, its machine and its models."""
    status = session.client().get("/fleet/v1/status")
    session.emit(status, lambda: render(status, terminal_width()))


def render(status: dict[str, Any], width: int | None) -> str:
    """The whole page. Fields may be missing: an older daemon does not send all of them."""
    facts = [
        ("home", one_line(str(status.get("home", "-")))),
        ("http", _http(status)),
        *_ollama(status),
        ("machine", _machine(status)),
    ]
    requests = status.get("requests") or {}
    names = ("running", "waiting", "completed", "failed")
    facts.append(("requests", ", ".join(f"{count(requests.get(name, 0))} {name}" for name in names)))
    facts += _fleet(status)
    lines = [wrapped(_headline(status), width), *(labelled(*fact, width, 10).rstrip() for fact in facts), ""]
    engines = status.get("engines") or []
    if engines:
        lines += drawn(fitted(_columns(engines), width))
        lines += [wrapped(line, width) for line in _remarks(engines)]
    else:
        default = one_line(str(status.get("default_model") or "the default model"))
        lines.append(wrapped(f"No model is loaded; {default} loads with the first request.", width))
    lines += [wrapped(pull_words(pull), width) for pull in status.get("pulls") or ()]
    if running := [_running(request) for request in status.get("running") or ()]:
        lines += ["", "RUNNING", *(wrapped(line, width) for line in running)]
    return "\n".join(lines)


def _running(request: dict[str, Any]) -> str:
    """What a request does: "qwen3-4b: reading the prompt, 1,280 of 4,367, for claude-cli, since 12 s"."""
    done, total = request.get("done", 0), request.get("total", 0)
    plan = request.get("plan") or {}
    elsewhere = plan.get("kind") not in (None, "", "local")
    parts = [
        str(request.get("stage") or "begins"),
        f"{count(done)} of {count(total)}" if total else "",
        f"{plan['kind']}: {listed(plan.get('nodes') or ())}" if elsewhere else "",
        f"for {request['client']}" if request.get("client") else "",
        f"since {rough(request.get('age_s') or 0)}",
    ]
    return one_line(f"{request.get('model')}: {', '.join(filter(None, parts))}")


def pull_words(pull: dict[str, Any]) -> str:
    """How far fetching a model is: "qwen3-4b: downloading model.safetensors, 1.2 GB of 2.3 GB"."""
    done, total = pull.get("done_bytes", 0), pull.get("total_bytes", 0)
    figures = f", {size(done)} of {size(total)}" if total else ""
    return one_line(f"{pull.get('model')}: {pull.get('stage') or 'being fetched'}{figures}")


def _columns(engines: list[dict[str, Any]]) -> list[Column]:
    kinds = [
        *(("MODEL", 9, False), ("STATE", 9, False), ("DEVICE", 4, False), ("WEIGHTS", 3, True)),
        *(("KV CACHE", 2, False), ("PREFILL", 6, True), ("DECODE", 6, True), ("WORK", 9, False)),
    ]
    cells = zip(*(_engine(engine) for engine in engines), strict=True)
    return [
        Column(header, [*each], keep, right) for (header, keep, right), each in zip(kinds, cells, strict=True)
    ]


def _remarks(engines: list[dict[str, Any]]) -> Iterator[str]:
    """What no column has: errors, doubts, loads, drafts, the parts of models over several machines."""
    told: tuple[Callable[[dict[str, Any]], str], ...] = (
        _error,
        _again,
        _doubt,
        _load,
        _drafts,
        _head,
        _held_together,
    )
    for tell in told:
        for engine in engines:
            if said := tell(engine):
                yield f"{one_line(str(engine.get('part_of') or engine.get('model')))}: {said}"


def _again(engine: dict[str, Any]) -> str:
    why = clause(str(engine.get("again") or ""))
    return f"loaded once more, as an answer goes on: {why}" if why else ""


def _error(engine: dict[str, Any]) -> str:
    return one_line(str(engine.get("error") or ""))


def _doubt(engine: dict[str, Any]) -> str:
    doubt = (engine.get("speed") or {}).get("doubt")
    return f"speeds in doubt ({one_line(doubt)}); they will be measured again" if doubt else ""


def _drafts(engine: dict[str, Any]) -> str:
    """What is out of the ordinary about the drafts of a model's answers; "" if nothing is."""
    verdict = one_line(str(engine.get("speculation") or ""))
    if verdict.startswith("declined"):
        return f"decoded without drafts, {verdict}"
    return f"drafts are {verdict}" if verdict.startswith("exact") and ";" in verdict else ""


def _head(engine: dict[str, Any]) -> str:
    """Why the head that lies with a model does not draft; "" if it does, or there is none."""
    said = one_line(str(engine.get("draft_head") or ""))
    return f"its head is {said}" if said.startswith("off") else ""


def _held_together(engine: dict[str, Any]) -> str:
    """Which machine holds which layers, of a model over several; "" of others."""
    members = engine.get("members") or []
    if engine.get("ranks"):
        return _divided(engine)
    if members:
        parts = [f"{layers(0, members[0]['first'])} here"]
        parts += [
            f"{layers(held['first'], held['last'])} on {one_line(held['name'])}{_far(held)}"
            for held in members
        ]
        return ", ".join(parts) + (", cut anew" if engine.get("cut_anew") else "")
    if not engine.get("asked_by"):
        return ""
    total = (engine.get("shape") or {}).get("layers")
    held = layers(engine.get("first_layer", 0), engine.get("last_layer", 0))
    return f"{held}{f' of {total}' if total else ''}, asked by {one_line(listed(engine['asked_by']))}"


def _far(held: dict[str, Any]) -> str:
    """How far another machine is with its part: " (reading 1.2 GB of 8.0 GB)"; "" once it has it."""
    if not (stage := one_line(str(held.get("stage") or ""))):
        return ""
    total = held.get("total_bytes") if stage in _IN_BYTES else 0
    figures = f" {size(held.get('done_bytes'))} of {size(total)}" if total else ""
    return f" ({stage}{figures})"


def _divided(engine: dict[str, Any]) -> str:
    """The part of every layer that a machine has, and which machines have the others."""
    if names := [f"{held['name']}{_far(held)}" for held in engine.get("members") or []]:
        return f"a part of every layer here and on {one_line(listed(names))}{_carried(engine)}"
    part = f"part {engine['rank'] + 1} of {engine['ranks']} of every layer"
    asked_by = engine.get("asked_by") or []
    asked = f", asked by {one_line(listed(asked_by))}" if asked_by else ""
    return f"{part}{asked}{_carried(engine)}"


def _carried(engine: dict[str, Any]) -> str:
    """How what the ranks send each other travels; "" before that is known."""
    carried = one_line(str(engine.get("carried") or ""))
    return f"; links {carried}" if carried else ""


def _headline(status: dict[str, Any]) -> str:
    state = daemon_word(status)
    version = one_line(str(status.get("version", "?")))
    up = duration(status.get("uptime_s", 0))
    return f"fleetd {version} · {state} · up {up} · pid {status.get('pid', '?')}"


def _http(status: dict[str, Any]) -> str:
    http = status.get("http")
    return f"{_url(http)}/v1" if http else "off"


def _ollama(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The address of Ollama's clients, where the settings ask for one."""
    if ollama := status.get("ollama"):
        return [("ollama", f"{_url(ollama)}, without a token")]
    missing = one_line(str(status.get("ollama_missing") or ""))
    return [("ollama", f"not served: {missing}")] if missing else []


def _url(address: dict[str, Any]) -> str:
    host = str(address["host"])
    return f"http://{f'[{host}]' if ':' in host else host}:{address['port']}"


def _machine(status: dict[str, Any]) -> str:
    machine, memory = status.get("machine") or {}, status.get("memory") or {}
    parts = [
        str(machine.get("platform") or "?"),
        str(machine.get("product") or ""),
        f"{machine.get('cpu') or '?'}, {machine.get('cores', '?')} cores",
        _gpu(machine),
        f"{size(machine.get('memory_bytes'))} memory, {_free(machine)}",
        f"{size(memory['usable_bytes'])} for models" if memory.get("usable_bytes") else "",
        "engine.overcommit is on: the machine may swap" if memory.get("overcommit") else "",
        f"tier {machine.get('tier', '?')}",
    ]
    if accelerator := machine.get("accelerator"):
        parts.append(str(accelerator))
    return one_line(" · ".join(part for part in parts if part))


def _gpu(machine: dict[str, Any]) -> str:
    """The GPU where it is not the processor's chip, with its own memory if it has some."""
    if not (name := str(machine.get("gpu") or "")) or name == machine.get("cpu"):
        return ""
    others = f", 1 of {machine['gpus']} is used" if machine.get("gpus", 0) > 1 else ""
    if not (own := machine.get("card_bytes")):
        return name + others
    return f"{name} with {size(own)}, {size(machine.get('card_free_bytes'))} free{others}"


def _free(machine: dict[str, Any]) -> str:
    if machine.get("free_unknown"):
        return "free unknown"
    pressure = str(machine.get("pressure") or "")
    short = f" (pressure: {pressure})" if pressure in ("warning", "critical") else ""
    return f"{size(machine.get('available_bytes'))} free{short}"


def _fleet(status: dict[str, Any]) -> list[tuple[str, str]]:
    """One line about the fleet, and one more for each machine that cannot be used."""
    fleet = status.get("fleet")
    if not fleet:
        return []
    if not fleet.get("enabled"):
        return [("fleet", OFF)]
    peers = fleet.get("peers") or []
    away = [peer for peer in peers if peer.get("state") != "usable"]
    line = summary(
        _machine_label(fleet),
        port=fleet.get("port", 0),
        usable=len(peers) - len(away),
        peers=len(peers),
        mdns=str(fleet.get("mdns") or "off"),
        local_only=bool(fleet.get("local_only")),
        pairing=bool(fleet.get("pairing")),
    )
    notes = [removal(str(fleet["removed_by"]))] if fleet.get("removed_by") else []
    notes += [crowd_of([str(name) for name in fleet["late"]])] if fleet.get("late") else []
    for peer in peers:
        if peer.get("new"):
            what, fix = newcomer(*(str(peer.get(key) or "?") for key in ("name", "short_id", "through")))
            notes.append(f"{what} {fix}")
    for peer in away:
        reason = f": {one_line(str(peer['reason']))}" if peer.get("reason") else ""
        state = one_line(state_word(str(peer.get("state"))))
        notes.append(f"{_machine_label(peer)} {state}{reason}")
    return [("fleet", line), *(("", text) for text in notes)]


def _machine_label(machine: dict[str, Any]) -> str:
    return label(str(machine.get("name") or "?"), str(machine.get("short_id") or "?"))


def _engine(engine: dict[str, Any]) -> tuple[str, ...]:
    state = str(engine.get("state", "?"))
    if state == "loading":
        state = f"loading: {engine.get('stage') or 'starting'}"
        if engine.get("total"):
            state += f" {100 * engine.get('done', 0) // engine['total']} %"
    elif _busy(engine) and engine.get("progress_age_s", 0) > 10:
        state = f"no progress for {duration(engine['progress_age_s'])}"
    kinds = ("prefilling", "decoding", "waiting", "assisting")
    work = [f"{engine[what]} {what}" for what in kinds if engine.get(what)]
    if not work:
        work = [f"idle {duration(engine.get('idle_s') or 0)}"] if state == "ready" else []
    if engine.get("restarts"):
        work.append(f"{engine['restarts']} restart{'s' if engine['restarts'] > 1 else ''}")
    shape, speed = engine.get("shape") or {}, engine.get("speed") or {}
    arithmetic = shape.get("cpu_arithmetic") or shape.get("dtype")
    device = " ".join(str(each) for each in (engine.get("device"), arithmetic) if each)
    kv = f"{size(engine.get('kv_bytes'))} of {size(engine.get('kv_budget_bytes'))}"
    return (
        _model(engine),
        state,
        device or "-",
        size(shape.get("weights_bytes")),
        kv,
        _speed(speed.get("prefill_tok_s")),
        _speed(speed.get("decode_tok_s")),
        ", ".join(work) or "-",
    )


def _load(engine: dict[str, Any]) -> str:
    """Where the seconds of its load went; "" if that is not known."""
    steps = engine.get("load_steps") or []
    total = duration(sum(step["seconds"] for step in steps))
    parts = ", ".join(f"{one_line(step['name'])} {duration(step['seconds'])}" for step in steps)
    done = "loading took so far" if engine.get("state") == "loading" else "loaded in"
    return f"{done} {total}: {parts}" if steps else ""


def _model(engine: dict[str, Any]) -> str:
    """The model's name; of a worker that has only some layers, these too."""
    if not engine.get("part_of"):
        return str(engine.get("model"))
    if engine.get("ranks"):
        return str(engine["part_of"])
    return f"{engine['part_of']}, {layers(engine.get('first_layer', 0), engine.get('last_layer', 0))}"


def _speed(tok_s: float | None) -> str:
    """The speed as measured at the load, and corrected by answers since."""
    if not tok_s:
        return "-"
    return f"{count(tok_s) if tok_s >= 99.95 else f'{tok_s:.1f}'} tok/s"


def _busy(engine: dict[str, Any]) -> bool:
    return bool(engine.get("prefilling") or engine.get("decoding"))
