"""Doctor's checks of what the daemon reports about itself."""

from __future__ import annotations

from typing import Any

from fleetctl.client import Client
from fleetctl.findings import Finding, fail, ok, warn
from fleetctl.text import duration, one_line, size
from fleetd import __version__, limits
from fleetd.errors import FleetError, ModelError

# Two missed beats (limits.ENGINE_BEAT_S) may be one long step; this is not.
_SLOW_S = 15.0


def daemon(status: dict[str, Any]) -> Finding:
    """Running, ready, and of the same version."""
    version = str(status.get("version"))
    if version != __version__:
        return fail(
            "daemon",
            f"It is version {one_line(version)}, fleetctl is {__version__}.",
            "Restart it: `fleetctl service install` (or stop and start `fleetd run`).",
        )
    if status.get("draining"):
        return warn(
            "daemon", "It is stopping and takes no new requests.", "Start it again once it has ended."
        )
    if not status.get("ready"):
        return warn(
            "daemon", "It has started but is not ready.", "Wait a second; its log tells what it waits for."
        )
    return ok(
        "daemon", f"fleetd {version}, pid {status.get('pid')}, up {duration(status.get('uptime_s') or 0)}"
    )


def engines(status: dict[str, Any]) -> list[Finding]:
    """Each loaded model makes progress, or none is loaded."""
    found = [_engine(engine) for engine in status.get("engines") or []]
    return found or [ok("engine", "no model is loaded; one is with the first request")]


def _engine(engine: dict[str, Any]) -> Finding:
    model, state = one_line(str(engine.get("model"))), engine.get("state")
    name = f"engine {model}"
    if state == "failed":
        reason = one_line(str(engine.get("error") or "no reason given"))
        return fail(
            name,
            f"It failed: {reason}",
            f"`fleetctl models verify {model}`, then `fleetctl models load {model}`.",
        )
    silent_s = float(engine.get("progress_age_s") or 0)
    working = engine.get("prefilling") or engine.get("decoding") or engine.get("waiting")
    fix = f"`fleetctl models unload {model}` ends its process; the next request starts a new one."
    if state == "ready" and working and silent_s > limits.ENGINE_STALL_S:
        return fail(name, f"It has work but made no progress for {duration(silent_s)}.", fix)
    if state == "ready" and working and silent_s > _SLOW_S:
        return warn(name, f"It has work but made no progress for {duration(silent_s)}.", fix)
    restarts = int(engine.get("restarts") or 0)
    if restarts > 2:
        return warn(name, f"It was restarted {restarts} times.", "The daemon's log tells why it ended.")
    return ok(name, f"{state}, {engine.get('device')}, {size(engine.get('memory_bytes'))}")


def default_model(client: Client, status: dict[str, Any]) -> Finding:
    """Installed and intact."""
    name = str(status.get("default_model") or "")
    shown = one_line(name)
    if not name:
        return warn(
            "model", "No default model is set.", "Set models.default in fleetd.toml, or name one per request."
        )
    try:
        models = client.get("/fleet/v1/models")
        if name not in {model.get("name") for model in models.get("installed") or []}:
            return warn(
                "model",
                f"The default model {shown} is not installed yet.",
                f"`fleetctl models pull {shown}`; otherwise the first request fetches it.",
            )
        verdict = client.post("/fleet/v1/models/verify", {"model": name}, timeout_s=limits.CLIENT_LONG_CALL_S)
    except ModelError as error:
        fix = error.hint or f"`fleetctl models remove {shown}`, then `fleetctl models pull {shown}`."
        return fail(
            "model", f"The default model {shown} is not usable: {one_line(error.message)}", one_line(fix)
        )
    except FleetError as error:
        fix = error.hint or "The daemon's log tells more."
        return fail("model", f"{shown} could not be checked: {one_line(error.message)}", one_line(fix))
    return ok("model", f"{shown} is intact, digest {one_line(str(verdict.get('digest')))[:24]}")
