"""No task that runs as long as the daemon may end it: each is named here, with what keeps its errors in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fleetd

FOLDER = Path(fleetd.__file__).parent
# In these a task that raises ends the group that it is in.
FILES = (
    "app.py",
    "fleet/service.py",
    "fleet/own_card.py",
    "p2p/dialer.py",
    "p2p/node.py",
    "p2p/port.py",
    "p2p/request_server.py",
)
RESTARTED = {
    *("pool", "watchdog", "prune", "keep awake", "card", "pinned models", "list models", "find digests"),
    *("save roster", "interfaces", "link prober", "origins"),
}
OTHERWISE = {
    "fleet": "a group of tasks that are named here",
    "node": "a group of tasks that are named here; its own loop is the mesh, which is restarted",
    "peer port": "waits for ever; an error of accept is caught, and it is tried again after a while",
    "discovery": "catches every error of mDNS and goes on without it",
    "dial": "one connection's: the error is the peer's state",
    "peer connection": "one connection's: its errors close it",
    "request": "one request's: its error is what the peer is told",
}


def tasks(file: str) -> Iterator[tuple[str, bool]]:
    """The name of each task of a group in a file, and whether ``keep_running`` restarts it."""
    tree = ast.parse((FOLDER / file).read_text())
    kept = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _keeps(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "create_task"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "group"
        ):
            work = node.args[0]
            yield _name(node), _keeps(work) or (isinstance(work, ast.Name) and work.id in kept)


def _keeps(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "keep_running"


def _name(call: ast.Call) -> str:
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "name"), None)
    match value:
        case ast.Constant(str(name)):
            return name
        case ast.JoinedStr([ast.Constant(str(name)), *_]):
            return name.strip()
    return "request"


def test_every_task_of_the_daemon_is_restarted_or_says_why_not() -> None:
    found = [task for file in FILES for task in tasks(file)]
    assert {name for name, restarted in found if restarted} == RESTARTED
    assert {name for name, restarted in found if not restarted} == set(OTHERWISE)


def test_no_other_file_starts_a_task_in_a_group_of_the_daemon() -> None:
    starting = {
        str(file.relative_to(FOLDER))
        for file in FOLDER.rglob("*.py")
        if "group.create_task(" in file.read_text()
    }
    # What runs several things at once for its caller, who gets their errors.
    assert starting - {"requests/concurrency.py"} == set(FILES)
