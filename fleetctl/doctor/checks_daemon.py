"""Doctor's checks of what the daemon reports about itself."""

from __future__ import annotations

from fleetctl.connection.client import Client
from fleetctl.connection.replies import read
from fleetctl.doctor.findings import Finding, fail, ok, warn
from fleetctl.render.text import duration, one_line, size
from fleetd import __version__, limits
from fleetd.control.daemon_status import DaemonStatus, EngineStatus
from fleetd.control.model_listing import ModelListing, ModelVerdict
from fleetd.errors import FleetError, ModelError

# Two missed heartbeats (limits.ENGINE_BEAT_S) may be one long step; so many seconds are not.
_SLOW_S = 15.0


def daemon(status: DaemonStatus) -> Finding:
    """Check that the daemon is ready, and of the same version as fleetctl."""
    version = status.version
    if version != __version__:
        return fail(
            "daemon",
            f"It is version {one_line(version)}, fleetctl is {__version__}.",
            "Restart it: `fleetctl service install` (or stop and start `fleetd run`).",
        )
    if status.draining:
        return warn(
            "daemon", "It is stopping and takes no new requests.", "Start it again once it has ended."
        )
    if not status.ready:
        return warn(
            "daemon", "It has started but is not ready.", "Wait a second; its log tells what it waits for."
        )
    return ok("daemon", f"fleetd {version}, pid {status.pid}, up {duration(status.uptime_s)}")


def power(status: DaemonStatus) -> list[Finding]:
    """Warn of a machine that may sleep while it computes."""
    if not status.power.refused:
        return []
    what = f"This machine may sleep while it computes: {one_line(status.power.refused)}."
    if "battery" in status.power.refused:
        return [warn("power", what, "Plug it in, or lower power.least_battery.")]
    return [warn("power", what, "Turn off automatic sleep in the system's settings, if it has any.")]


def ollama(status: DaemonStatus) -> list[Finding]:
    """Warn of an address for Ollama's clients that the settings ask for and the daemon could not open."""
    if not status.ollama_missing:
        return []
    what = f"Ollama's clients are not served: {one_line(status.ollama_missing)}."
    return [
        warn("ollama", what, "End that program and restart fleetd, or choose another http.ollama_listen.")
    ]


def digests(status: DaemonStatus) -> list[Finding]:
    """Warn of models whose files could not be hashed."""
    return [
        warn(
            f"model {one_line(name)}",
            f"Its files could not be hashed, so other machines do not help with it: {one_line(why)}",
            f"`fleetctl models verify {one_line(name)}` reads them now; the daemon tries again by itself.",
        )
        for name, why in status.undigested.items()
    ]


def engines(status: DaemonStatus) -> list[Finding]:
    """Check that each loaded model makes progress."""
    found = [_engine(engine) for engine in status.engines]
    return found or [ok("engine", "no model is loaded; one is with the first request")]


def _engine(engine: EngineStatus) -> Finding:
    model = one_line(engine.model)
    name = f"engine {model}"
    if engine.state == "failed":
        reason = one_line(engine.error or "no reason given")
        return fail(
            name,
            f"It failed: {reason}",
            f"`fleetctl models verify {model}`, then `fleetctl models load {model}`.",
        )
    silent_s = engine.progress_age_s
    fix = f"`fleetctl models unload {model}` ends its process; the next request starts a new one."
    if engine.state == "ready" and engine.busy and silent_s > _SLOW_S:
        level = fail if silent_s > limits.ENGINE_STALL_S else warn
        return level(name, f"It has work but made no progress for {duration(silent_s)}.", fix)
    if engine.restarts > 2:
        return warn(
            name, f"It was restarted {engine.restarts} times.", "The daemon's log tells why it ended."
        )
    return ok(name, f"{engine.state}, {engine.device}, {size(engine.memory_bytes)}")


def models(client: Client) -> list[Finding]:
    """Check that each folder that looks like a model can be asked for, and has nothing that is not used."""
    try:
        listing = read(client.get("/fleet/v1/models"), ModelListing)
    except FleetError as error:
        return [fail("models", one_line(error.message), "The daemon's log tells more.")]
    found = [
        warn(
            "models",
            f"{one_line(model.name)} answers without {one_line(', '.join(model.ignored))} beside it.",
            "Fuse the adapter with the model: mlx_lm.fuse.",
        )
        for model in listing.installed
        if model.ignored
    ]
    found += [
        warn(
            "models",
            f"{one_line(each.path)} is not listed: {one_line(each.reason)}",
            "Rename the folder, or give it a name: fleetctl models add FOLDER --name NAME.",
        )
        for each in listing.unlisted
    ]
    installed = len(listing.installed)
    said = f"{installed} installed, each can be asked for" if installed else "none is installed yet"
    return found or [ok("models", said)]


def default_model(client: Client, status: DaemonStatus) -> Finding:
    """Check that the default model is installed and its files are intact."""
    name = status.default_model
    shown = one_line(name)
    if not name:
        return warn(
            "model", "No default model is set.", "Set models.default in fleetd.toml, or name one per request."
        )
    try:
        models = read(client.get("/fleet/v1/models"), ModelListing)
        if name not in {model.name for model in models.installed}:
            return warn(
                "model",
                f"The default model {shown} is not installed yet.",
                f"`fleetctl models pull {shown}`; otherwise the first request fetches it.",
            )
        answer = client.post("/fleet/v1/models/verify", {"model": name}, timeout_s=limits.CLIENT_LONG_CALL_S)
        verdict = read(answer, ModelVerdict)
    except ModelError as error:
        fix = error.hint or f"`fleetctl models remove {shown}`, then `fleetctl models pull {shown}`."
        return fail(
            "model", f"The default model {shown} is not usable: {one_line(error.message)}", one_line(fix)
        )
    except FleetError as error:
        fix = error.hint or "The daemon's log tells more."
        return fail("model", f"{shown} could not be checked: {one_line(error.message)}", one_line(fix))
    return ok("model", f"{shown} is intact, digest {one_line(verdict.digest)[:24]}")
