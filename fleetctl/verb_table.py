"""The verbs of fleetctl, in the groups in which the help shows them."""

from __future__ import annotations

from collections.abc import Mapping

# Group → verb → what the help says of it, in fewer than 50 letters. Each verb lives in fleetctl/verbs/VERB.py
# as `command`; a verb costs its import only when it runs.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Ask": {
        "chat": "Ask a question, or talk with the model",
        "launch": "Start a coding agent with these models",
        "env": "Print the address and key for other programs",
        "compress": "Show what smart prefill would keep of a text",
        "embed": "Make vectors of files or lines",
        "rerank": "Show which files answer a question best",
    },
    "Models": {
        "models": "List, pull, load, pin and remove models",
        "cache": "Show or throw away kept prompts",
    },
    "Machines": {
        "pair": "Let another machine into this fleet",
        "join": "Enter the fleet of a machine that shows a code",
        "peers": "Show the machines, and what they do",
        "unpair": "Remove a machine from the fleet",
    },
    "Look": {
        "status": "Show the daemon, its machine and models",
        "open": "Open the page of the whole fleet",
        "plan": "Show how a prompt would be answered, and why",
        "trace": "Show where past requests spent their time",
        "usage": "Show tokens and speeds per day and model",
    },
    "Run": {
        "service": "Run fleetd in the background, from login on",
        "doctor": "Check everything, and say what to mend",
        "completion": "Print the completion of commands for a shell",
    },
}
VERBS = tuple(sorted(verb for group in GROUPS.values() for verb in group))
_START = "`fleetd run` starts the daemon in this terminal, `fleetctl service install` at each login."
_STOP = "Ctrl-C ends `fleetd run`; `fleetctl service uninstall` ends the service and keeps its home."
_RESTART = "Ctrl-C and `fleetd run`; of a service, `fleetctl service install` once more."
_UPGRADE = "Install the new fleetd as you installed this one, then start the daemon again."
_UNINSTALL = (
    "`fleetctl service uninstall`, then remove fleetd as you installed it. The home that `fleetctl status`"
    " names stays."
)
_LOGS = (
    "The log is in the terminal of `fleetd run`. That of a service is in `journalctl --user -u fleetd`"
    " (without --user for a --system one), or on a Mac in fleetd.log in the home."
)
_SETTINGS = "`fleetd config show` lists the settings; the page of `fleetctl open` changes them."
_OF_MODELS = ("add", "list", "load", "pin", "pull", "remove", "search", "unload", "unpin", "verify")
# What people type that is no verb → what to do in its place.
INSTEAD: Mapping[str, str] = {
    "help": "`fleetctl --help` lists them, `fleetctl chat --help` explains one.",
    "ask": "`fleetctl chat` asks the model.",
    **dict.fromkeys(("run", "serve", "start"), _START),
    "stop": _STOP,
    "restart": _RESTART,
    **dict.fromkeys(("log", "logs"), _LOGS),
    **dict.fromkeys(("update", "upgrade"), _UPGRADE),
    "uninstall": _UNINSTALL,
    **dict.fromkeys(("config", "settings"), _SETTINGS),
    **{verb: f"That is `fleetctl models {verb}`." for verb in _OF_MODELS},
    "ls": "`fleetctl models` lists the models.",
    "rm": "`fleetctl models remove` deletes a model.",
    "ps": "`fleetctl status` shows what runs.",
    "machines": "`fleetctl peers` shows the machines.",
}
