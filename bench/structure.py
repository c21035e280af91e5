"""What the tree costs a reader, in numbers: ``python -m bench.structure [REVISION ...]``.

Each revision is a column; the working tree is the last one. Reads sources and runs nothing of them.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
ROOTS = ("fleetd", "fleetctl", "tests", "bench", "docs")
WRITTEN_BY_THE_BUILD = "fleetd/_version.py"

# Facts of a model and speeds measured of it. A struct that declares this many of them describes a model by
# itself; one that nests such a struct does not.
FACTS = frozenset(
    {
        *(
            "dtype",
            "hidden_bytes",
            "hidden_width",
            "kv_bytes_per_token",
            "last_layer",
            "layers",
            "outside_bytes",
        ),
        *("state_bytes", "token_bytes", "weights_bytes", "window_bytes_per_token", "window_tokens"),
        *("decode_tok_s", "load_s", "prefill_context_s", "prefill_fixed_s", "prefill_tok_s"),
    }
)
LEAST_FACTS = 4

# What a reader looks up when a change of a kind is made: a word that is in every file that such a change
# touches. The sampling parameter and the speed figure are ones that exist.
TASKS = {
    "files that name the sampling parameter min_p": re.compile(r"\bmin_p\b"),
    "files that name the speed figure prefill_context_s": re.compile(r"\bprefill_context_s\b"),
}
# The heading of a task in docs/contributing.md, whose table names the files that it touches.
TABLES = re.compile(r"^## ((?:Add an?|Find|Constrain|Run) .+)$")
FILE = re.compile(r"`((?:fleetd|bench|docs)/[\w/.-]+\.(?:py|toml|json|md))`")

Sources = dict[str, str]


def of_working_tree() -> Sources:
    """Path and text of every file that is tracked or new."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", *ROOTS).decode()
    return {
        path: (REPO / path).read_text(encoding="utf-8")
        for path in listed.splitlines()
        if path.endswith((".py", ".md", ".toml")) and (REPO / path).is_file()
    }


def of_revision(revision: str) -> Sources:
    """The same of a commit. Raises subprocess.CalledProcessError if there is no such commit."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, *ROOTS))) as archive:
        return {
            member.name: file.read().decode()
            for member in archive
            if member.name.endswith((".py", ".md", ".toml")) and (file := archive.extractfile(member))
        }


def rows(sources: Sources) -> dict[str, int]:
    """Every figure of one tree, by its name."""
    python = {
        path: text for path, text in sources.items() if path.endswith(".py") and path != WRITTEN_BY_THE_BUILD
    }
    trees = {path: ast.parse(text) for path, text in python.items() if is_daemon(path)}
    return {
        **lines_by_package(python),
        "lines of fleetd that are code": sum(code_lines(python[path], tree) for path, tree in trees.items()),
        "files at the top of fleetd": _at_top(python, "fleetd"),
        "files at the top of fleetd/engine": _at_top(python, "fleetd/engine"),
        "structs that describe a model": len(descriptions(trees)),
        "coroutines awaited for each token in the pipeline": len(awaited_per_token(trees)),
        **{
            name: sum(bool(word.search(text)) for path, text in python.items() if path in trees)
            for name, word in TASKS.items()
        },
        **{
            f"{heading}: files": n
            for heading, n in files_of_tasks(sources.get("docs/contributing.md", "")).items()
        },
    }


def is_daemon(path: str) -> bool:
    """True for a module of ``fleetd``."""
    return path.startswith("fleetd/") and path.endswith(".py") and path != WRITTEN_BY_THE_BUILD


def lines_by_package(python: Sources) -> dict[str, int]:
    """Lines of Python in all, in ``fleetd`` by package, and in tests."""
    found: Counter[str] = Counter()
    for path, text in python.items():
        root, *rest = path.split("/")
        n = text.count("\n")
        found[f"lines of {root}"] += n
        if root == "fleetd":
            found[f"  lines of fleetd/{rest[0]}" if len(rest) > 1 else "  lines at its top"] += n
    return dict(
        sorted(
            found.items(), key=lambda row: (row[0].strip().replace("lines at", "lines of fleetd/"), row[0])
        )
    )


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that have more than white space, a comment or a part of a docstring."""
    prose = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and n not in prose for n, line in lines
    )


def descriptions(trees: dict[str, ast.Module]) -> list[str]:
    """Names of the structs that declare at least LEAST_FACTS facts of a model themselves."""
    return [
        f"{path}:{node.name}"
        for path, node in _classes(trees)
        if len(
            FACTS
            & {
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            }
        )
        >= LEAST_FACTS
    ]


def awaited_per_token(trees: dict[str, ast.Module]) -> list[str]:
    """The pipeline's steps whose ``on_event`` is a coroutine of its own: each is awaited for every token."""
    return [
        f"{path}:{node.name}"
        for path, node in _classes(trees)
        if path.startswith("fleetd/requests/")
        and any(
            isinstance(method, ast.AsyncFunctionDef) and method.name == "on_event" for method in node.body
        )
    ]


def files_of_tasks(page: str) -> dict[str, int]:
    """Files of the repository that the tables of docs/contributing.md name for each kind of change."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading = match[1] if (match := TABLES.match(line)) else ""
        elif heading and line.startswith("|"):
            found.setdefault(heading, set()).update(FILE.findall(line))
    return {heading: len(files) for heading, files in found.items()}


def _classes(trees: dict[str, ast.Module]) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def _at_top(python: Sources, folder: str) -> int:
    return sum(path.rpartition("/")[0] == folder for path in python)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=REPO, check=True, capture_output=True).stdout  # noqa: S607


def main(revisions: list[str], write: Callable[[str], object] = sys.stdout.write) -> None:
    """Print the table."""
    columns = {
        **{revision: rows(of_revision(revision)) for revision in revisions},
        "now": rows(of_working_tree()),
    }
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    width = max(map(len, names))
    write(f"{'':{width}}" + "".join(f"{name[:10]:>12}" for name in columns) + "\n")
    for name in names:
        cells = "".join(f"{column.get(name, '-'):>12}" for column in columns.values())
        write(f"{name:{width}}{cells}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
