"""A model family is named in one table of the engine and in one of the tests, and nowhere beside them."""

from __future__ import annotations

import ast
from pathlib import Path

from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.layers.architectures import CUT, REFUSED

REPO = Path(__file__).parents[2]
# Formats of tool calls have names of their own, which are mlx-lm's: some are a family's.
FORMATS = CALL_FORMATS.keys()


def strings(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_the_engine_names_a_family_in_its_table_only() -> None:
    for path in sorted((REPO / "fleetd" / "engine").rglob("*.py")):
        if path.name != "architectures.py":
            assert not strings(path) & {*CUT, *REFUSED} - FORMATS, path


def test_the_page_and_the_parameters_of_tests_take_them_from_there() -> None:
    for path in ("docs/generate_models.py", "tests/support/family_params.py"):
        text = (REPO / path).read_text(encoding="utf-8")
        table = text.partition("POPULAR = [")[2].partition("\n]\n")[0]
        named = strings(REPO / path) & {*CUT, *REFUSED}
        assert all(f'"{name}"' in table for name in named), path
