"""`fleetctl status`: what the daemon is, what it runs on and what it is doing."""

from __future__ import annotations

from typing import Any

import click

from fleetctl.cli import Session, json_option, pass_session
from fleetctl.text import count, duration, one_line, size, table


@click.command("status")
@json_option
@pass_session
def command(session: Session) -> None:
    """Show the daemon, its machine and its models."""
    status = session.client().get("/fleet/v1/status")
    session.emit(status, lambda: render(status))


def render(status: dict[str, Any]) -> str:
    """The page for people; tolerant of missing fields, because an older daemon may lack some."""
    facts = [
        ("home", one_line(str(status.get("home", "-")))),
        ("http", _http(status)),
        ("machine", _machine(status)),
    ]
    requests = status.get("requests") or {}
    names = ("running", "waiting", "completed", "failed")
    facts.append(("requests", ", ".join(f"{count(requests.get(name, 0))} {name}" for name in names)))
    lines = [_headline(status), *(f"{name:<10}{value}" for name, value in facts), ""]
    engines = status.get("engines") or []
    if engines:
        header = ("MODEL", "STATE", "DEVICE", "WEIGHTS", "KV CACHE", "WORK")
        lines.append(table(header, [_engine(engine) for engine in engines], right=(3,)))
        lines += [
            f"{one_line(engine['model'])}: {one_line(engine['error'])}"
            for engine in engines
            if engine.get("error")
        ]
    else:
        default = one_line(str(status.get("default_model") or "the default model"))
        lines.append(f"No model is loaded; {default} loads with the first request.")
    return "\n".join(lines)


def _headline(status: dict[str, Any]) -> str:
    state = "draining" if status.get("draining") else "ready" if status.get("ready") else "not ready"
    version = one_line(str(status.get("version", "?")))
    up = duration(status.get("uptime_s", 0))
    return f"fleetd {version} · {state} · up {up} · pid {status.get('pid', '?')}"


def _http(status: dict[str, Any]) -> str:
    http = status.get("http")
    if not http:
        return "off"
    host = str(http["host"])
    return f"http://{f'[{host}]' if ':' in host else host}:{http['port']}/v1"


def _machine(status: dict[str, Any]) -> str:
    machine = status.get("machine") or {}
    parts = [
        str(machine.get("platform") or "?"),
        f"{machine.get('cpu') or '?'}, {machine.get('cores', '?')} cores",
        f"{size(machine.get('memory_bytes'))} memory, {size(machine.get('available_bytes'))} free",
        f"tier {machine.get('tier', '?')}",
    ]
    if accelerator := machine.get("accelerator"):
        parts.append(str(accelerator))
    return one_line(" · ".join(parts))


def _engine(engine: dict[str, Any]) -> tuple[str, ...]:
    state = str(engine.get("state", "?"))
    if state == "loading":
        state = f"loading: {engine.get('stage') or 'starting'}"
        if engine.get("total"):
            state += f" {100 * engine.get('done', 0) // engine['total']} %"
    elif _busy(engine) and engine.get("progress_age_s", 0) > 10:
        state = f"no progress for {duration(engine['progress_age_s'])}"
    work = [f"{engine[what]} {what}" for what in ("prefilling", "decoding", "waiting") if engine.get(what)]
    if not work:
        work = [f"idle {duration(engine.get('idle_s') or 0)}"] if state == "ready" else ["-"]
    if engine.get("restarts"):
        work.append(f"{engine['restarts']} restarts")
    device = " ".join(str(engine[key]) for key in ("device", "dtype") if engine.get(key))
    kv = f"{size(engine.get('kv_bytes'))} of {size(engine.get('kv_budget_bytes'))}"
    return (
        str(engine.get("model")),
        state,
        device or "-",
        size(engine.get("weights_bytes")),
        kv,
        ", ".join(work),
    )


def _busy(engine: dict[str, Any]) -> bool:
    return bool(engine.get("prefilling") or engine.get("decoding"))
