"""Images over real sockets: a daemon with a model that reads them, each vendor's own client, and a machine of
the fleet that has no such model."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import seeing_model
from forked_programs import Programs
from live_fleet import LiveFleet

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

SEER, CHAIN = "seer", "chain"
QUESTION = "What is this?"


def data(seed: int) -> str:
    return base64.b64encode(seeing_model.picture(seed)).decode()


@pytest.fixture(scope="module")
def fleet(
    live_models: Path, short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    """alpha has a model that reads images; beta has one that reads text."""
    seer = seeing_model.write(tmp_path_factory.mktemp("models") / SEER)
    models = {"alpha": [seer], "beta": [live_models / CHAIN]}
    with LiveFleet(short_dir / "images", models, programs=programs) as found:
        found.until_usable()
        found.load("alpha", SEER, seen_by="beta")
        yield found


def by_openai(fleet: LiveFleet, name: str, seed: int, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=fleet[name].base_url, api_key=fleet[name].key, max_retries=0)
    parts: Any = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(seed)}"}},
        {"type": "text", "text": QUESTION},
    ]
    with contextlib.closing(client):
        return client.chat.completions.with_raw_response.create(
            model=SEER,
            messages=[{"role": "user", "content": parts}],
            temperature=0,
            max_tokens=12,
            **fields,
        )


def text(raw: Any) -> str:
    return str(raw.parse().choices[0].message.content)


def test_each_vendors_client_gets_the_same_answer(fleet: LiveFleet) -> None:
    alpha = fleet["alpha"]
    seen = text(by_openai(fleet, "alpha", 1))
    assert seen != text(by_openai(fleet, "alpha", 2))
    root = alpha.base_url.removesuffix("/v1")
    with contextlib.closing(anthropic.Anthropic(base_url=root, api_key=alpha.key, max_retries=0)) as client:
        source: Any = {"type": "base64", "media_type": "image/png", "data": data(1)}
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        said = client.messages.create(
            model=SEER,
            max_tokens=12,
            messages=[{"role": "user", "content": content}],
            extra_body={"temperature": 0},
        )
        assert "".join(block.text for block in said.content if block.type == "text") == seen
        counted = client.messages.count_tokens(model=SEER, messages=[{"role": "user", "content": content}])
        assert counted.input_tokens == said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)
    with contextlib.closing(openai.OpenAI(base_url=alpha.base_url, api_key=alpha.key)) as client:
        items: Any = [
            {"type": "input_image", "image_url": f"data:image/png;base64,{data(1)}"},
            {"type": "input_text", "text": QUESTION},
        ]
        answer = client.responses.create(
            model=SEER, input=[{"role": "user", "content": items}], temperature=0, max_output_tokens=12
        )
        assert answer.output_text == seen
    told = ollama.Client(host=root, headers={"Authorization": f"Bearer {alpha.key}"})
    with contextlib.closing(told._client):
        replied = told.chat(
            SEER,
            [{"role": "user", "content": QUESTION, "images": [seeing_model.picture(1)]}],
            options={"temperature": 0, "num_predict": 12},
        )
        assert replied.message.content == seen
        assert "vision" in (told.show(SEER).capabilities or [])


def test_the_second_question_about_an_image_reads_it_from_the_cache(fleet: LiveFleet) -> None:
    by_openai(fleet, "alpha", 3)
    usage = by_openai(fleet, "alpha", 3).parse().usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_an_image_is_kept_on_the_disk_over_a_restart(fleet: LiveFleet) -> None:
    """A prompt of several blocks, all of them rows of images."""
    alpha = fleet["alpha"]
    parts: Any = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(20 + n)}"}}
        for n in range(30)
    ]

    def asked() -> Any:
        with contextlib.closing(
            openai.OpenAI(base_url=alpha.base_url, api_key=alpha.key, max_retries=0)
        ) as client:
            return client.chat.completions.create(
                model=SEER, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=8
            )

    first = asked()
    alpha.restart()
    fleet.load("alpha", SEER, seen_by="beta")
    again = asked()
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_machine_without_the_model_asks_the_one_that_has_it(fleet: LiveFleet) -> None:
    seen = text(by_openai(fleet, "alpha", 1))
    raw = by_openai(fleet, "beta", 1)
    assert text(raw) == seen
    assert raw.headers["x-fleet-plan"].startswith("remote")


def test_a_model_for_text_refuses_before_it_is_loaded(fleet: LiveFleet) -> None:
    beta = fleet["beta"]
    with contextlib.closing(openai.OpenAI(base_url=beta.base_url, api_key=beta.key, max_retries=0)) as client:
        parts: Any = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(1)}"}}]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=CHAIN, messages=[{"role": "user", "content": parts}])
    assert refused.value.code == "unsupported_parameter"
    assert "chain reads text only" in refused.value.message
    assert CHAIN not in [engine["model"] for engine in beta.status()["engines"]]


def test_a_file_that_is_no_image_is_refused_and_the_worker_goes_on(fleet: LiveFleet) -> None:
    alpha = fleet["alpha"]
    worker = alpha.engine_pid(SEER)
    with contextlib.closing(
        openai.OpenAI(base_url=alpha.base_url, api_key=alpha.key, max_retries=0)
    ) as client:
        broken = base64.b64encode(seeing_model.picture(1)[:-30]).decode()
        parts: Any = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}}]
        with pytest.raises(openai.BadRequestError, match="no image that can be read"):
            client.chat.completions.create(model=SEER, messages=[{"role": "user", "content": parts}])
    by_openai(fleet, "alpha", 1)
    assert alpha.engine_pid(SEER) == worker


def test_smart_prefill_leaves_images_alone_and_says_so(fleet: LiveFleet) -> None:
    raw = by_openai(fleet, "alpha", 1, extra_body={"smart_prefill": True})
    assert text(raw) == text(by_openai(fleet, "alpha", 1))


def test_models_say_that_they_read_images(fleet: LiveFleet) -> None:
    alpha = fleet["alpha"]
    with contextlib.closing(openai.OpenAI(base_url=alpha.base_url, api_key=alpha.key)) as client:
        facts: Any = client.models.retrieve(SEER)
    assert facts.fleet["images"] is True
    assert "chat, images" in alpha.fleetctl("models").stdout
