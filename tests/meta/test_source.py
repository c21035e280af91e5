"""What must hold for the source as a whole, however it changes."""

from __future__ import annotations

import ast
import gc
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fleetd import errors, limits
from fleetd.errors import BY_CODE, FleetError, from_code

REPO = Path(__file__).parents[2]
PACKAGES = ("fleetd", "fleetctl")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def walked(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Millions of nodes: no collector looks at them while these tests need them, and then they are gone."""
    gc.disable()
    yield
    gc.enable()
    walked.cache_clear()
    parsed.cache_clear()


def modules(packages: tuple[str, ...] = PACKAGES) -> Iterator[tuple[Path, ast.Module]]:
    for package in packages:
        for path in sorted((REPO / package).rglob("*.py")):
            yield path.relative_to(REPO), parsed(path)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of names, else nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=REPO
    )
    return set(done.stdout.split())


# ---- What is loaded --------------------------------------------------------------------------------------


def test_the_daemon_loads_no_model_library() -> None:
    loaded = loaded_by(
        "import fleetd.app, fleetd.cli, fleetd.engine.daemon_side.pool, fleetd.models.model_store"
    )
    assert "aiohttp" in loaded
    assert not loaded & {"mlx", "mlx_lm", "torch", "transformers", "huggingface_hub", "numpy", "tokenizers"}


def test_fleetctl_loads_no_server_and_no_model_library() -> None:
    loaded = loaded_by("import fleetctl.cli, fleetctl.verbs.chat, fleetctl.chat.repl, fleetctl.verbs.doctor")
    assert "click" in loaded
    assert not loaded & {
        "aiohttp",
        "uvloop",
        "mlx",
        "mlx_lm",
        "torch",
        "transformers",
        "huggingface_hub",
        "numpy",
    }


# ---- What is never written -------------------------------------------------------------------------------

# Each can run what it is given to read.
CODE_RUNNERS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "runpy.run_path",
}
CODE_CARRIERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_code_is_ever_made_from_data() -> None:
    found = []
    for path, tree in modules():
        for node in walked(tree):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                shell = any(
                    k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                    for k in node.keywords
                )
                trusting = any(
                    k.arg in ("trust_remote_code", "allow_pickle")
                    and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                    for k in node.keywords
                )
                if name in CODE_RUNNERS or shell or trusting:
                    found.append(f"{path}:{node.lineno} {name}")
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found += [f"{path} imports {name}" for name in names if name.partition(".")[0] in CODE_CARRIERS]
    assert not found


def test_every_module_says_its_idea() -> None:
    silent = [str(path) for path, tree in modules() if tree.body and not ast.get_docstring(tree)]
    assert not silent


@pytest.mark.parametrize("packages", [PACKAGES, ("tests",)], ids=["the program", "its tests"])
def test_a_class_name_means_one_thing(packages: tuple[str, ...]) -> None:
    """A name in two places sends a reader to the wrong one."""
    places: dict[str, list[str]] = {}
    for path, tree in modules(packages):
        for node in walked(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}


# ---- What is opened --------------------------------------------------------------------------------------

# Makes its own lock; takes a member out of an archive whose hash is known.
OPENS_ITS_OWN = {
    "fleetd/models/catalog.py": ".read_bytes",  # a file of the package
    "fleetd/models/install.py": "os.open",
    "fleetd/models/pull/wheel.py": "archive.open",
}


def test_files_of_models_are_opened_in_one_place() -> None:
    """Anything else may wait for a pipe that a stranger put there."""
    found = []
    for path, tree in modules(("fleetd",)):
        if not str(path).startswith("fleetd/models/") or path.name == "opening.py":
            continue
        for node in walked(tree):
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
            modes = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            reads = name.rpartition(".")[2] in {"read_text", "read_bytes"}
            opens = name.rpartition(".")[2] in {"open", "FileIO"} and not modes & {"wb", "ab"}
            if (reads or opens) and OPENS_ITS_OWN.get(str(path)) != name:
                found.append(f"{path}:{node.lineno}: {name}")
    assert found == []


def test_no_large_file_is_in_the_tree() -> None:
    """Weights, wheels and archives are fetched, and never committed."""
    folders = ("bench", "demo", "docs", "eval", "fleetctl", "fleetd", "packaging", "tests")
    files = [file for folder in folders for file in (REPO / folder).rglob("*")]
    # Logs of tests begin with a dot.
    files += [file for file in REPO.iterdir() if not file.name.startswith(".")]
    assert len(files) > 1000
    assert [str(file) for file in files if file.is_file() and file.stat().st_size > limits.MIB] == []


# ---- Bounds ----------------------------------------------------------------------------------------------


def test_kinds_are_decoded_in_one_place() -> None:
    """msgspec learns a kind without a lock (fleetd/text/decoding.py)."""
    found = [
        f"{path}:{node.lineno}"
        for path, tree in modules()
        if path != Path("fleetd/text/decoding.py")
        for node in walked(tree)
        if isinstance(node, ast.Call)
        and (
            re.fullmatch(r"(msgspec\.)?(convert|(json|msgpack|toml|yaml)\.Decoder)", dotted(node.func))
            or (
                re.fullmatch(r"(msgspec\.)?(json|msgpack|toml|yaml)\.decode", dotted(node.func))
                and any(keyword.arg == "type" for keyword in node.keywords)
            )
        )
    ]
    assert found == []


def test_protocols_are_few() -> None:
    """One with a single class behind it ends the search for a definition in a corridor of doors."""
    found = {
        f"{path}: {node.name}"
        for path, tree in modules()
        for node in walked(tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in map(dotted, node.bases)
    }
    assert len(found) <= 20, sorted(found)


def test_docstrings_say_what_they_are_about() -> None:
    """Not "Of all layers." but "The parts of all layers.": a reader comes from anywhere."""
    elliptic = ("Of", "As", "With", "By", "From", "In", "At", "For", "One prompt's")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path}:{node.body[0].lineno}: {text.splitlines()[0]}"
        for path, tree in modules()
        for node in walked(tree)
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        # A module may describe a way: "From messages to token ids".
        if not isinstance(node, ast.Module) and text.startswith(tuple(f"{word} " for word in elliptic))
    ]
    assert not found, "\n".join(found)


def test_every_bound_is_applied_somewhere() -> None:
    """A bound that nothing reads protects nothing."""
    read: set[str] = set()
    for path, tree in modules():
        for node in walked(tree):
            if isinstance(node, ast.Attribute) and dotted(node.value).endswith("limits"):
                read.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module == "fleetd.limits":
                read |= {alias.name for alias in node.names}
            elif path.name == "limits.py" and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                read.add(node.id)
    bounds = {name for name in vars(limits) if name.isupper()}
    assert bounds - read == set()


# ---- Errors ----------------------------------------------------------------------------------------------


def family(root: type[FleetError]) -> list[type[FleetError]]:
    ours = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(kind for child in ours for kind in family(child))]


def test_every_error_has_a_code_of_its_own() -> None:
    kinds = family(FleetError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert "code" in vars(kind)
        assert 400 <= kind.status < 600
        assert BY_CODE[kind.code] is kind
        again = from_code(kind.code, "It broke.", hint="Mend it.", param="x")
        assert (type(again), str(again), again.param) == (kind, "It broke. Mend it.", "x")


# ---- Pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("catalog", "choose", "errors", "gguf", "http"),
        *("models", "protocol", "settings"),
    ],
)
def test_the_generated_page_is_up_to_date(name: str) -> None:
    script = f"docs/generate_{name}.py"
    page = runpy.run_path(str(REPO / script))["page"]()
    assert (REPO / "docs" / f"{name}.md").read_text(encoding="utf-8") == page, f"run: python {script}"


@pytest.mark.parametrize("name", ["macs", "links", "large-models", "smart-prefill"])
def test_the_tables_of_prices_are_up_to_date(name: str) -> None:
    page = runpy.run_path(str(REPO / "docs/generate_pairs.py"))["page"](name)
    assert (REPO / "docs" / f"{name}.md").read_text(encoding="utf-8") == page, "run: docs/generate_pairs.py"


def test_no_page_has_a_table_twice() -> None:
    """As a generator would leave it that did not find its markers."""
    for path in (REPO / "docs").rglob("*.md"):
        heads = re.findall(r"^(\|.+\|)\n\|(?:-+\|)+\n((?:\|.+\n?)+)", path.read_text(encoding="utf-8"), re.M)
        assert len(set(heads)) == len(heads), path.name


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
    assert len(pages) > 8
    broken = [
        f"{page.relative_to(REPO)} → {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken


FILE = re.compile(r"`((?:fleetd|fleetctl|tests|bench|eval|demo|docs)/[\w./-]+\.\w+|(?:\w+/)+\w+\.py)`")
TERM = re.compile(r"\| `(\w+)` in `([\w.]+)` \|")


def test_every_file_that_a_page_names_exists() -> None:
    """A path begins at the root of the repository, or in ``fleetd`` or ``tests``."""
    pages = [REPO / "README.md", REPO / "CHANGELOG.md", *(REPO / "docs").rglob("*.md")]
    missing = [
        (page.name, file)
        for page in pages
        for file in set(FILE.findall(page.read_text(encoding="utf-8")))
        if not any((REPO / root / file).exists() for root in ("", "fleetd", "tests"))
    ]
    assert missing == []


def test_the_lists_of_pages_have_them_all() -> None:
    """One list in docs, and one of the decisions."""
    docs = REPO / "docs"
    decisions = {path.name for path in (docs / "decisions").glob("*.md")} - {"README.md"}
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    pages -= {"README.md", *(f"decisions/{name}" for name in decisions)}
    listed = LINK.findall((docs / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(pages)
    rows = (docs / "decisions" / "README.md").read_text(encoding="utf-8").partition("|---|---|")[2]
    assert LINK.findall(rows) == sorted(decisions)


def test_twelve_pages_come_first() -> None:
    text = (REPO / "docs" / "README.md").read_text(encoding="utf-8")
    first = text.partition("## The twelve pages to read first")[2].partition("\n## ")[0]
    assert len(LINK.findall(first)) == 12


def test_every_class_of_the_glossary_is_where_it_says() -> None:
    places = {
        (node.name, ".".join(path.with_suffix("").parts))
        for path, tree in modules()
        for node in walked(tree)
        if isinstance(node, ast.ClassDef)
    }
    terms = TERM.findall((REPO / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert len(terms) >= 25
    missing = [
        (name, package)
        for name, package in terms
        if not any(name == known and f"{place}.".startswith(f"{package}.") for known, place in places)
    ]
    assert missing == []


def test_decisions_are_numbered_without_gaps_and_all_say_the_same_four_things() -> None:
    records = sorted((REPO / "docs" / "decisions").glob("[0-9]*.md"))
    assert [path.name[:4] for path in records] == [f"{i:04}" for i in range(1, len(records) + 1)]
    for path in records:
        text = path.read_text(encoding="utf-8")
        for heading in ("## Context", "## Choice", "## Cost", "## What would change our mind"):
            assert heading in text, f"{path.name}: {heading}"


def test_every_proof_the_threat_model_names_exists() -> None:
    page = (REPO / "docs" / "threat-model.md").read_text(encoding="utf-8")
    files = set(re.findall(r"\b([a-z]+/test_\w+\.py)", page))
    assert len(files) > 10
    assert [file for file in files if not (REPO / "tests" / file).exists()] == []
    source = "".join(path.read_text(encoding="utf-8") for path in (REPO / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"::(test_\w+)", page) if f"def {name}(" not in source]
    assert missing == []


def test_no_pattern_of_a_field_lets_a_newline_follow() -> None:
    """To Python's ``$`` a string may go on with one newline, which msgspec's patterns inherit."""
    found = 0
    for path in sorted((REPO / "fleetd").rglob("*.py")):
        for node in walked(parsed(path)):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "pattern"
                and isinstance(node.value, ast.Constant)
            ):
                pattern = str(node.value.value)
                found += 1
                bare = pattern.endswith("$") and not pattern.endswith("(?!\\n)$")
                assert not bare, f"{path.name}: {pattern}"
    assert found >= 5


# ---- Kinds of state --------------------------------------------------------------------------------------

# What any module may ask of mlx-lm: to make a model's caches, and a list of tokens.
ANY_MODULE = {"make_prompt_cache", "TokenBuffer"}
# The table of kinds, caches of sparse prefill's own, and what a CPU reads of windows in place of mlx-lm's.
KNOW_CACHES = (
    "fleetd/engine/sequence_state/",
    "fleetd/engine/sparse_prefill/sparse_caches.py",
    "fleetd/engine/cpu/windows.py",
)


def test_one_package_knows_the_cache_classes_of_mlx_lm() -> None:
    asked = {
        f"{path}: {alias.name}"
        for path, tree in modules()
        if not str(path).startswith(KNOW_CACHES)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "mlx_lm.models.cache"
        for alias in node.names
        if alias.name not in ANY_MODULE
    }
    assert not asked


# Where mlx-lm's caches are written into: the kinds, and the sparse kinds, which are caches themselves.
WRITE_CACHES = ("fleetd/engine/sequence_state/", "fleetd/engine/sparse_prefill/")


def test_one_module_knows_where_a_cache_that_rotates_writes_next() -> None:
    """A member that mlx-lm keeps to itself; asked for by name, it would be missed in silence."""
    known = {
        str(path)
        for path, tree in modules()
        for node in walked(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "_idx")
        or (isinstance(node, ast.Constant) and node.value == "_idx")
    }
    assert known == {"fleetd/engine/sequence_state/write_index.py"}


def test_nothing_but_the_kinds_sets_how_much_a_cache_holds() -> None:
    set_here = {
        f"{path}:{node.lineno}: {dotted(target)}"
        for path, tree in modules()
        if str(path).startswith("fleetd/engine/") and not str(path).startswith(WRITE_CACHES)
        for node in walked(tree)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (each.elts if isinstance(each, ast.Tuple) else [each])
        if isinstance(target, ast.Attribute)
        and target.attr == "offset"
        # Of an answer's text.
        and not dotted(target).endswith("text.offset")
    }
    assert not set_here
