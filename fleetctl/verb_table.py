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
