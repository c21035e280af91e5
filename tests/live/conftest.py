"""A real daemon for the tests that do not harm it: the default model, one of known answers, a quick one."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import chain_model
import forked_programs
import pytest
import scripted_answers
import scripted_model
import sharing
from forked_programs import Programs
from live_daemon import LiveDaemon
from live_fleet import LiveFleet
from scripted_daemon import ScriptedDaemon

from fleetd.models.folder import ModelFolder

# The clients' tests live beside the API's own; here they meet a real daemon instead of a scripted one.
sys.path.append(str(Path(__file__).parents[1] / "api"))

# So does the hub that the tests of downloads have.
sys.path.append(str(Path(__file__).parents[1] / "models"))

from api_fakes import Target

SMOL = "smollm2-135m"
# It says random words of the default model's vocabulary, for tests of what holds for any model.
QUICK = "quick"
DEEP = "deep"


@pytest.fixture(scope="session")
def live_models(embedded_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder that tests may add to: the default model, the chain model and a quick one."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(embedded_model.path, folder / SMOL)
    chain_model.build(folder / "chain")
    scripted_model.build(folder / QUICK, embedded_model.path, context=8192)
    return folder


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of enough layers to share, a tenth of the default one: what machines do with layers does not
    depend on their size. Its weights take 19 MB in int8. Two machines cannot divide its heads."""
    return sharing.write(
        tmp_path_factory.mktemp("models") / DEEP,
        hidden_size=288,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=9,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )


@pytest.fixture(scope="session")
def short_dir() -> Iterator[Path]:
    """Socket paths are limited to about 100 bytes; pytest's own folders can be deeper."""
    path = Path(tempfile.mkdtemp(prefix="fl-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def live(live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveDaemon]:
    with LiveDaemon(short_dir / "live", live_models, programs=programs) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def loaded_smol(live: LiveDaemon) -> str:
    """The default model's name. Its first load tries its arithmetic, for longer than a client waits."""
    live.control("POST", "/fleet/v1/models/load", {"model": SMOL})
    return SMOL


@pytest.fixture(scope="session")
def scripted(
    embedded_model: ModelFolder, short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedDaemon]:
    """A daemon with one model, ``scripted``, whose answers a test writes."""
    if not forked_programs.AVAILABLE:
        pytest.skip("workers are not forked here, so their answers cannot be scripted: NOT tried")
    models, script = tmp_path_factory.mktemp("scripted"), tmp_path_factory.mktemp("script") / "turns.json"
    scripted_model.build(models / scripted_model.NAME, embedded_model.path)
    variables = {scripted_answers.VARIABLE: str(script)}
    with LiveDaemon(short_dir / "scripted", models, programs=programs, **variables) as daemon:
        yield ScriptedDaemon(daemon, script)


@pytest.fixture
def make_daemon(
    live_models: Path, short_dir: Path, programs: Programs
) -> Iterator[Callable[..., LiveDaemon]]:
    """A daemon for one test, which may stop or harm it. ``forked=False``: started as users do."""
    with ExitStack() as stack:

        def make(*, forked: bool = True, **settings: str) -> LiveDaemon:
            home = Path(tempfile.mkdtemp(prefix="d-", dir=short_dir)) / "home"
            by = programs if forked else None
            return stack.enter_context(LiveDaemon(home, live_models, programs=by, **settings))

        yield make


@pytest.fixture
def make_fleet(short_dir: Path, programs: Programs) -> Iterator[Callable[..., LiveFleet]]:
    """A fleet for one test, which may harm it."""
    with ExitStack() as stack:

        def make(models: Mapping[str, Iterable[Path]], **options: Any) -> LiveFleet:
            root = Path(tempfile.mkdtemp(prefix="f-", dir=short_dir)) / "f"
            return stack.enter_context(LiveFleet(root, models, programs=programs, **options))

        yield make


@pytest.fixture(scope="session")
def target(live: LiveDaemon) -> Target:
    return Target(live.base_url, live.key, QUICK, tools=False)
