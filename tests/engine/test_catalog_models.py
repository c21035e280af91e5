"""What the catalog and the page of models promise of a model is true of a small one of its type."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlx_lm.models import glm4_moe, solar_open
from mlx_lm.utils import MODEL_REMAPPING
from tiny_architectures import FAMILIES, tiny

from fleetd.engine.layers.architectures import ANY_TEXT, CUT, REFUSED
from fleetd.engine.scoring.attention_pass import AttentionTap
from fleetd.engine.speculation.drafter import DraftModel
from fleetd.models.catalog import entries

pytestmark = pytest.mark.usefixtures("cpu_installed")
PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_models.py"))
DRAFTERS = {entry.draft for entry in entries() if entry.draft}


@pytest.mark.parametrize("kind", sorted({e.model_type for e in entries() if "compressor" in e.roles}))
def test_what_the_catalog_calls_a_compressor_shows_its_attention(kind: str) -> None:
    assert AttentionTap.of(tiny(kind)).heads


@pytest.mark.parametrize(
    "kind", sorted({e.model_type for e in entries() if "draft" in e.roles or e.name in DRAFTERS})
)
def test_what_the_catalog_lets_draft_can_go_back_in_a_text(kind: str) -> None:
    drafting = DraftModel(tiny(kind))
    drafting.committed([1, 2, 3])
    guess = drafting.guess([])
    drafting.guess([guess.second])
    assert drafting.guess([]).first == guess.first


def test_every_type_of_the_catalog_is_cut_or_refused_by_name() -> None:
    for entry in entries():
        if entry.purpose != "chat":
            continue
        code = MODEL_REMAPPING.get(entry.model_type, entry.model_type)
        assert code in {*CUT, *REFUSED, *ANY_TEXT}, entry.name
        assert code in REFUSED or entry.model_type in FAMILIES, entry.name


def test_the_popular_families_are_named_as_their_published_configs_name_them() -> None:
    published = {entry.model_type for entry in entries()}
    for family, types in PAGE["POPULAR"]:
        assert set(types) <= published, family
        assert all(map(PAGE["can_be_cut"], types)), family


def test_what_the_page_says_of_types_that_mlx_lm_has_no_code_for_still_holds() -> None:
    """Once it has some, their heads can be added to ``fleetd.models.heads``."""
    assert "Inkling (`inkling_mm_model`)" in PAGE["page"]()
    assert find_spec("mlx_lm.models.inkling_mm_model") is None
    assert "inkling_mm_model" not in MODEL_REMAPPING


def test_a_type_without_a_model_of_its_own_stands_beside_the_one_that_it_runs() -> None:
    assert solar_open.Model is glm4_moe.Model
    assert "| `glm4_moe`, `solar_open` |" in PAGE["page"]()
    assert PAGE["can_be_cut"]("solar_open")
