"""A real daemon keeps prompts on the disk: warm after a restart, and cleared when told to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_hybrid
from forked_programs import Programs
from live_daemon import LiveDaemon, until

from fleetd import limits
from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"
LONG = " ".join(f"On day {day} the ship was {day * 37 % 101} miles from the coast." for day in range(30))


def ask(daemon: LiveDaemon, text: str, **fields: Any) -> Any:
    with openai.OpenAI(base_url=daemon.base_url, api_key=daemon.key, max_retries=0, timeout=90) as client:
        messages: Any = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            messages=messages, temperature=0, logprobs=True, **{"model": MODEL, "max_tokens": 4} | fields
        )


def kept_snapshots(daemon: LiveDaemon, tokens: int) -> int:
    """Files that are whole, besides those of the rows of so many tokens."""
    models = daemon.control("GET", "/fleet/v1/cache")["models"]
    return int(sum(model["blocks"] for model in models)) - tokens // limits.CACHE_BLOCK_TOKENS


def restored(reply: Any) -> int:
    return int(reply.timings.get("restored_n", 0))


@pytest.fixture(scope="module")
def hybrid(
    tmp_path_factory: pytest.TempPathFactory, short_dir: Path, programs: Programs
) -> Iterator[LiveDaemon]:
    """A daemon with a hybrid, as a user put it there."""
    folder = tmp_path_factory.mktemp("models")
    tiny_hybrid.build(folder / tiny_hybrid.NAME)
    with LiveDaemon(short_dir / "hybrid", folder, programs=programs) as daemon:
        # Nothing is kept on the disk before the files are hashed, which is done beside the first requests.
        assert daemon.fleetctl("models", "verify", tiny_hybrid.NAME).returncode == 0
        yield daemon


def test_a_prompt_is_read_once_also_after_an_unload_and_a_restart_until_it_is_cleared(
    hybrid: LiveDaemon,
) -> None:
    text, model, daemon = LONG[:900], tiny_hybrid.NAME, hybrid
    first = ask(daemon, text, model=model)
    places = (first.usage.prompt_tokens - 1) // 256 * 256
    assert places >= 768
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    for warm in (partial(daemon.fleetctl, "models", "unload", model), daemon.restart):
        until(lambda: kept_snapshots(daemon, places) >= 2)
        warm()
        again = ask(daemon, text, model=model)
        assert again.usage.prompt_tokens_details.cached_tokens == restored(again) == places
        assert again.timings["restore_ms"] > 0
        assert again.choices == first.choices

    until(lambda: daemon.control("GET", "/fleet/v1/cache")["models"][0]["hits"] == 2)
    told = daemon.fleetctl("trace", daemon.control("GET", "/fleet/v1/traces?last=1")["traces"][0]["id"])
    assert f"({places:,} from the disk)" in told.stdout
    assert "are gone" in daemon.fleetctl("cache", "clear", "--yes").stdout
    # From memory they are gone, too.
    computed = ask(daemon, text, model=model)
    assert computed.usage.prompt_tokens_details.cached_tokens == 0
    assert computed.choices == first.choices


def test_a_hybrid_goes_on_at_a_cache_control_mark(hybrid: LiveDaemon) -> None:
    marked = {"type": "text", "text": f"Harbour. {LONG[:500]}", "cache_control": {"type": "ephemeral"}}

    def read(question: str) -> int:
        """Tokens that were computed."""
        content = [marked, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        body = {"model": tiny_hybrid.NAME, "messages": messages, "max_tokens": 1}
        usage = hybrid.control("POST", "/v1/messages", body)["usage"]
        return int(usage["input_tokens"] + usage["cache_creation_input_tokens"])

    assert read(f"Where was the ship? {LONG[500:900]}") > 800
    # A token for each character.
    assert read("And when?") < len("\nAnd when?") + limits.CHECKPOINT_APART_TOKENS


@pytest.mark.long
def test_the_default_model_reads_a_prompt_once_also_after_a_restart(
    make_daemon: Callable[..., LiveDaemon],
) -> None:
    daemon = make_daemon()
    first = ask(daemon, LONG)
    whole_blocks = (first.usage.prompt_tokens - 1) // limits.CACHE_BLOCK_TOKENS * limits.CACHE_BLOCK_TOKENS
    assert (first.usage.prompt_tokens_details.cached_tokens, restored(first)) == (0, 0)
    assert whole_blocks >= 256
    until(lambda: daemon.control("GET", "/fleet/v1/cache")["models"][0]["block_tokens"] == whole_blocks, 60)

    daemon.restart()
    second = ask(daemon, LONG)
    assert second.usage.prompt_tokens_details.cached_tokens == restored(second) == whole_blocks
    assert second.choices == first.choices


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_machine_that_dies_while_it_writes_has_whole_blocks_or_none(
    make_daemon: Callable[..., LiveDaemon],
) -> None:
    """Killed as soon as so many files are there, of which the last one is probably half written."""
    daemon = make_daemon()
    settings = DiskCacheSettings(
        str(daemon.home / "cache" / "kv"), str(daemon.home / "identity" / "kv.key"), 1 << 30
    )
    blocks = Path(settings.folder) / "blocks"
    ask(daemon, "Say hello.")
    with ThreadPoolExecutor(1) as pool:
        for files in (1, 2, 3):
            text = f"Story {files}. {LONG} {LONG}"
            # Its answer is decoded meanwhile, so that blocks are written slowly.
            answer = pool.submit(ask, daemon, text, max_tokens=512)
            until(lambda least=files: len(list(blocks.iterdir())) >= least, 240)
            daemon.kill()
            with contextlib.suppress(openai.OpenAIError):
                answer.result()
            daemon.restart()
            kept = ask(daemon, text)
            assert (
                kept.usage.prompt_tokens_details.cached_tokens
                == restored(kept)
                <= limits.CACHE_BLOCK_TOKENS * files
            )
            daemon.control("POST", "/fleet/v1/cache/clear", {})
            computed = ask(daemon, text)
            assert computed.usage.prompt_tokens_details.cached_tokens == 0
            assert kept.choices == computed.choices
            daemon.control("POST", "/fleet/v1/cache/clear", {})
    daemon.stop()
    store = BlockStore(settings)
    store.validate()
    store.close()
