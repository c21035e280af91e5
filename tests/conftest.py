"""Fixtures that every area shares: both event loops, and the real embedded model, fetched once."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_programs
import blas_threads
import forked_programs
import httpx
import pytest
import set_speeds
import uvloop
from forked_programs import Programs
from hypothesis import HealthCheck, settings

from fleetd.engine.cpu import products

# Before anything can import mlx: its CPU backend binds to the BLAS that is there first.
products.preload_blas()
# The models that are computed with in this process are so small that a second thread gains nothing. And where
# other programs take the processors, each product waits until the system runs that thread: beside two busy
# loops the tests of sharing took twice as long with it. Forked workers have one thread as well
# (support/forked_programs.py); those of the real command and tests/engine/test_cpu.py have all.
blas_threads.use(1)

from fleetd.startup import import_index  # noqa: E402

# Transformers lists its modules at each import, which takes over a second: once for all runs of the tests.
_CACHE = Path(__file__).parents[1] / ".cache"
_INDEXED = import_index.stored(_CACHE)
_INDEXED.__enter__()

from fleetd.models.folder import ModelFolder  # noqa: E402
from fleetd.models.model_store import ModelStore  # noqa: E402
from fleetd.models.pull import process  # noqa: E402
from fleetd.requests.ledger import Ledger  # noqa: E402
from fleetd.requests.metrics import Metrics  # noqa: E402
from fleetd.storage.store import Store  # noqa: E402

# A shell starts background jobs with SIGINT ignored, and that is inherited by every program the tests start;
# those that get Ctrl-C must not depend on how the tests were started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of what else the machine does than of the code.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Each run draws other examples; `make test-long` draws more of them at once.
settings.register_profile("quick", _ANY_MACHINE, max_examples=40)
settings.register_profile("long", _ANY_MACHINE, max_examples=200)
settings.load_profile("quick")


# Each HTTP client reads all of the web's certificate authorities, a twentieth of a second: once is enough.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

# Collecting imports modules and makes items, all of which stay: looking at them again and again is in vain.
gc.disable()


def pytest_collection_finish() -> None:
    """What is imported by now stays: full collections need not look at it, a twentieth of the time."""
    _INDEXED.__exit__(None, None, None)
    gc.enable()
    gc.collect()
    gc.freeze()


_exit_code: int | None = None


def pytest_sessionfinish(exitstatus: int) -> None:
    """A process that a failed test left behind would be waited for at the end, and holds pipes of others."""
    global _exit_code
    _exit_code = int(exitstatus)
    for child in multiprocessing.active_children():
        child.kill()


@pytest.hookimpl(wrapper=True)
def pytest_unconfigure() -> Iterator[None]:
    """What fails only here, after the tests, is an error all the same."""
    global _exit_code
    try:
        return (yield)
    except BaseException:
        _exit_code = None
        raise


@atexit.register
def _leave() -> None:
    """End without the destructors of MLX, MKL and onnxruntime: a process hung in them after its last test.

    Registered first, so it runs after all else that is registered.
    """
    if _exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Every async test runs on both loops, except where what is tested is another process's work.

    The cases of one test take turns; the long tests run each on the other loop, too.
    """
    if item.get_closest_marker("one_loop"):
        return {"uvloop": LOOPS["uvloop"]}
    return LOOPS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An async test's first case stays on asyncio, the second on uvloop, and so on; marks the rest long.

    A test with one case runs on both.
    """
    # By test: its cases in their order, and their items.
    tests: dict[tuple[Any, str], dict[str, list[pytest.Item]]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None or item.get_closest_marker("one_loop") or item.get_closest_marker("long"):
            continue
        loop, _, case = spec.id.partition("-")
        if loop in LOOPS:
            tests.setdefault((item.parent, item.originalname), {}).setdefault(case, []).append(item)
    for cases in tests.values():
        for number, runs in enumerate(cases.values() if len(cases) > 1 else ()):
            for item in runs:
                if not item.callspec.id.startswith(list(LOOPS)[number % len(LOOPS)]):
                    item.add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Forks real workers and daemons; it starts with the first. Here every worker is forked by it.

    Their speeds are set: which plan is cheaper must not depend on what else the processors do.
    """
    made = Programs(
        tmp_path_factory.mktemp("programs") / "log",
        limits=set_speeds.LIMITS,
        install=["set_speeds", "scripted_answers", "found_once", "held_prompts"],
    )
    with pytest.MonkeyPatch.context() as patch:
        if forked_programs.AVAILABLE:
            patch.setattr(asyncio, "create_subprocess_exec", made.exec)
        yield made
    made.close()


@pytest.fixture(scope="session")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs a coding agent, once; returns the folder of its programs."""

    @functools.cache
    def installed(agent: str) -> Path:
        return agent_programs.install(tmp_path_factory.mktemp(agent), agent)

    return installed


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Kept between runs, so that the default model is downloaded once."""
    return _CACHE / "models"


@pytest.fixture(scope="session")
def embedded_model(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The real default model."""
    store = ModelStore(models_dir, hub_cache=tmp_path_factory.mktemp("no-hub"))
    return store.resolve(process.pull("smollm2-135m", store, lambda progress: None))


@pytest.fixture(scope="session")
def minilm(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The real model for vectors."""
    store = ModelStore(models_dir, hub_cache=tmp_path_factory.mktemp("no-hub"))
    return store.resolve(process.pull("all-minilm-l6-v2", store, lambda progress: None))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "fleetd.db")
    yield opened
    opened.close()


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("0")
