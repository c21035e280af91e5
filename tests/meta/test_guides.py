"""The README's figures agree with each other, and guides name models and pages that are there."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import yaml

from fleetd.limits import GIB
from fleetd.models import catalog
from fleetd.models.choosing import recommended
from fleetd.plan.refusals import Code

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
README = (REPO / "README.md").read_text(encoding="utf-8")
# What Codex, Claude Code and opencode need of a model's context (docs/claude-code.md).
AGENT_TOKENS = 32_768
ANCHOR = re.compile(r"\]\((?P<page>(?!https?://)[^)#\s]*)#(?P<name>[^)\s]+)\)")


def test_the_first_figure_of_the_readme_is_the_demo_s_and_the_bench_s() -> None:
    first = README.partition("\n## ")[0]
    told = re.search(r"the first word comes ([\d.]+) times as soon", first)
    drawn = re.search(r"after ([\d.]+) s on two machines, ([\d.]+) s on one", picture("gain"))
    measured = re.search(r"first token \| ([\d.]+)\S as soon", README)
    assert told
    assert drawn
    assert measured
    together_s, alone_s = map(float, drawn.groups())
    assert abs(float(measured[1]) - float(told[1])) < 0.1
    # A run of the demo is one run; it may show more than is promised, and hardly less.
    assert -0.1 < alone_s / together_s - float(told[1]) < 0.25


def test_the_figures_of_the_readme_are_in_the_benchmarks() -> None:
    pages = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("\n## ")
    row = re.compile(r"^\| (.+) \| (.+) \| `python -m bench (?:--runs 1 )?([\w-]+)` \|$", re.MULTILINE)
    rows = row.findall(README)
    assert len(rows) >= 5
    for what, told, family in rows:
        figures = re.findall(r"[\d.]+ ?[\u00d7%s]", told)
        assert figures, what
        measured = "".join(page for page in pages if re.search(rf"`python -m bench [^`]*\b{family}`", page))
        assert [figure for figure in figures if f" {figure} " not in measured] == [], what


def test_pages_that_compare_with_llama_cpp_have_the_figures_of_the_readme() -> None:
    told = re.search(r"llama\.cpp .* \| ([\d.]+)\S its speed with 135M parameters, ([\d.]+)\S with", README)
    assert told
    least, most = told.groups()
    for name in ("limits.md", "trouble.md"):
        assert f"{least} to {most} of its speed" in (DOCS / name).read_text(encoding="utf-8"), name
    compared = (DOCS / "compared.md").read_text(encoding="utf-8")
    assert {least, most} <= set(re.findall(r"([\d.]+) times", compared))


def test_both_pictures_are_of_one_run() -> None:
    drawn = re.search(r"after ([\d.]+) s on two machines, ([\d.]+) s on one", picture("gain"))
    assert drawn
    shown = {
        f"{float(seconds):.1f}" for seconds in re.findall(r"first token after ([\d.]+) s", picture("demo"))
    }
    assert set(drawn.groups()) <= shown


def picture(name: str) -> str:
    return (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")


def test_a_newcomer_reads_what_was_not_tried_and_what_has_to_fit() -> None:
    first = README.partition("\n## ")[0]
    assert "A model that fits no machine runs on several" in first
    assert "has not run on a Mac" in first


def test_the_models_for_agents_fit_and_can_do_it() -> None:
    room = runpy.run_path(str(DOCS / "generate_choose.py"))["room_gib"]
    text = (DOCS / "claude-code.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) GB \| `([\w.-]+)`", text, re.MULTILINE)
    assert len(rows) >= 5
    for memory, name in rows:
        entry = catalog.find(name)
        assert entry is not None, name
        assert entry.memory_gib <= room(int(memory)), name
        assert entry.context_tokens >= AGENT_TOKENS, name
        assert entry.tools, name
        needs = {each.name: each.memory_bytes for each in catalog.entries()}
        assert "coding" in recommended(catalog.entries(), needs, int(room(int(memory)) * GIB))[name], name


def test_every_reason_against_a_machine_has_advice() -> None:
    text = (DOCS / "trouble.md").read_text(encoding="utf-8")
    table = text.partition("## The second machine never helps")[2].partition("\n## ")[0]
    named = [code for row in re.findall(r"^\|.*\| (.+) \|$", table, re.MULTILINE) for code in row.split(", ")]
    assert sorted(code.strip("`") for code in named if code.startswith("`")) == sorted(get_args(Code))


def test_settings_to_copy_can_be_read_by_their_programs() -> None:
    text = (DOCS / "clients.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(json|yaml|toml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"json", "yaml", "toml"}
    readers: dict[str, Callable[[str], Any]] = {
        "json": json.loads,
        "yaml": yaml.safe_load,
        "toml": tomllib.loads,
    }
    assert all(readers[kind](block) for kind, block in blocks)


def test_settings_to_copy_name_models_of_the_catalog() -> None:
    block = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
    texts = [text for page in DOCS.glob("*.md") for text in block.findall(page.read_text(encoding="utf-8"))]
    models = [found["models"] for found in map(tomllib.loads, texts) if "models" in found]
    named = [each[key] for each in models for key in ("default", "large", "small") if key in each]
    named += [pair.partition("=")[0] for each in models for pair in each.get("kv_bits", [])]
    assert len(named) >= 4
    assert [name for name in named if name not in {entry.name for entry in catalog.entries()}] == []


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings, and the anchors that it has itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    names = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        bare = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.add(re.sub(r"[^\w\- ]", "", bare).strip().replace(" ", "-"))
    return names


def test_links_into_a_page_lead_to_a_heading() -> None:
    pages = [*REPO.glob("*.md"), *DOCS.rglob("*.md")]
    links = [
        (page, page.parent / found["page"] if found["page"] else page, found["name"])
        for page in pages
        for found in ANCHOR.finditer(page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 30
    broken = [
        f"{page.relative_to(REPO)} → {target.name}#{name}"
        for page, target, name in links
        if target.suffix == ".md" and name not in anchors(target)
    ]
    assert broken == []


def test_pages_for_users_give_memory_in_gb() -> None:
    """Of 10^9 bytes. Pages with figures of benches, and settings as they are typed, are left out."""
    left_out = {"benchmarks.md", "settings.md", "platforms.md", "threat-model.md", "CHANGELOG.md"}
    pages = [*REPO.glob("*.md"), *DOCS.glob("*.md")]
    assert [p.name for p in pages if p.name not in left_out and "GiB" in p.read_text(encoding="utf-8")] == []
