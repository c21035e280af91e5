"""Two answers at once: of which models mlx-lm can make one batch."""

from __future__ import annotations

import pytest
from tiny_architectures import FAMILIES, tiny

from fleetd.engine.loading import decodes_together

pytestmark = pytest.mark.usefixtures("cpu_installed")

# Its own attention, which caps the scores, takes the mask's rows for heads. This tiny one has as many heads
# as there are answers, so that nothing fails: the numbers are others.
ONE_AT_A_TIME = {"gemma2"}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_answers_share_a_batch_where_the_model_can(name: str) -> None:
    assert decodes_together(tiny(name)) == (name not in ONE_AT_A_TIME)
