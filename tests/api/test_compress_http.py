"""POST /v1/compress: what comes back of a prompt and of messages, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import MODEL, FakeCompressing, serve, services, status

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.errors import EngineDied
from fleetd.requests.smart_prefill.skip import SkipCompression

TEXT = "".join(f"line {n}\n" for n in range(10))
LONG = "\n\n".join(f"Line {n} of a text that asks for nothing at all." for n in range(100))


async def asked(
    body: dict[str, Any], fake: FakeCompressing | None = None, *, system_context: bool = False
) -> tuple[int, Any, Any]:
    fake, defaults = fake or FakeCompressing(), SmartPrefillPolicy(system_context=system_context)
    made = services(compressing=fake, smart_defaults=defaults)
    async with serve(made) as site, site.client() as session:
        async with session.post("/v1/compress", json=body) as response:
            return response.status, await response.json(), response.headers


async def test_a_prompt_comes_back_with_less_in_it() -> None:
    fake = FakeCompressing()
    code, reply, headers = await asked({"prompt": TEXT, "target_ratio": 0.5, "max_keep_tokens": 70}, fake)
    assert code == 200
    assert "line 0" in reply["prompt"]
    assert "line 1\n" not in reply["prompt"]
    spans = reply["kept"][0]["spans"]
    assert [TEXT[a:b] for a, b in spans] == [f"line {n}\n" for n in range(0, 10, 2)]
    assert reply["usage"] == {"original_tokens": 100, "compressed_tokens": 50, "total_tokens": 120}
    assert reply["timings"] == {"score_ms": 500.0, "select_ms": 10.0}
    assert (reply["model"], reply["declined"], reply["object"]) == (MODEL, "", "compression")
    assert headers["X-SmartPrefill-Compressed-Tokens"] == "50"
    policy = fake.passages[0].policy
    assert (policy.target_ratio, policy.max_keep_tokens, policy.mode) == (0.5, 70, "text")
    assert fake.closed == [""]


async def test_messages_come_back_as_messages() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    _, reply, _ = await asked({"messages": messages})
    assert [message["role"] for message in reply["messages"]] == ["system", "user"]
    assert "prompt" not in reply
    assert [kept["index"] for kept in reply["kept"]] == [0, 1]


async def test_a_long_system_prompt_is_material_if_the_settings_say_so() -> None:
    system = {"role": "system", "content": f"Be short.\n\n{TEXT * 20}\n\nBe kind."}
    for wanted in (False, True):
        fake = FakeCompressing()
        await asked(
            {"messages": [system, {"role": "user", "content": "Which line?"}]}, fake, system_context=wanted
        )
        assert bool(fake.passages[0].document.blocks[0].context) == wanted


async def test_a_question_is_read_with_the_prompt_and_is_no_part_of_the_answer() -> None:
    fake = FakeCompressing()
    _, reply, _ = await asked({"prompt": TEXT, "question": "Which line?"}, fake)
    assert fake.passages[0].document.question == "Which line?"
    assert "Which line?" not in reply["prompt"]
    assert len(reply["kept"]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"messages": [{"role": "user", "content": "b"}], "question": "?"}, "question"),
        ({"prompt": "a", "target_ratio": 0}, "target_ratio"),
        ({"prompt": "a", "target_ratio": 1.5}, "target_ratio"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "min_keep_tokens": 9, "max_keep_tokens": 3}, "smart_prefill"),
        ({"prompt": "a", "target_rato": 0.5}, "target_rato"),
        ({"prompt": "a", "question": "b?", "without_question": True}, "without_question"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    code, reply, _ = await asked(body)
    assert (code, reply["error"]["param"]) == (400, param)


async def test_a_conversation_with_images_is_refused_by_name() -> None:
    """What is left out of a text would move the places of its images, which nothing scores."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    code, reply, _ = await asked({"messages": [{"role": "user", "content": [part]}]})
    assert (code, reply["error"]["code"]) == (400, "unsupported_parameter")
    assert "images" in reply["error"]["message"]
    assert "aGk" not in str(reply)


@pytest.mark.parametrize(
    ("body", "without"),
    [
        ({"prompt": TEXT}, True),
        ({"prompt": TEXT, "without_question": False}, False),
        ({"prompt": f"{LONG}\n\nWhich line is the last?"}, False),
        ({"prompt": f"{LONG}\n\nWhich line is the last?", "without_question": True}, True),
        ({"prompt": TEXT, "question": "Which line?"}, False),
        ({"messages": [{"role": "user", "content": LONG}]}, True),
        ({"messages": [{"role": "user", "content": LONG}, {"role": "user", "content": "Which?"}]}, False),
    ],
)
async def test_what_nobody_asks_about_is_scored_without_a_question(
    body: dict[str, Any], without: bool
) -> None:
    fake = FakeCompressing()
    code, reply, _ = await asked(body, fake)
    assert code == 200
    assert fake.passages[0].policy.without_question is without
    assert reply["scored"] == ("without question" if without else "by question")


async def test_a_compressor_that_is_not_measured_yet_is_an_error_here() -> None:
    fake = FakeCompressing()
    fake.trouble = SkipCompression("measuring", "m is not measured for scoring yet.")
    code, reply, _ = await asked({"prompt": TEXT}, fake)
    assert (code, reply["error"]["code"]) == (503, "scorer_not_ready")
    assert reply["error"]["message"] == "m is not measured for scoring yet."


async def test_no_compressor_is_an_error_here() -> None:
    fake = FakeCompressing()
    fake.trouble = SkipCompression("no_compressor", "No machine has a model that can score prompts now.")
    code, reply, _ = await asked({"prompt": TEXT}, fake)
    assert (code, reply["error"]["code"]) == (503, "no_machine")
    assert "fleetctl models pull smollm2-135m" in reply["error"]["hint"]
    assert fake.closed == ["no_compressor"]


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("qwen3-0.6b", "`fleetctl models pull qwen3-0.6b` gets it."),
        ("org/scorer-4bit", "`fleetctl models pull org/scorer-4bit` gets it."),
        ("qwen3-0.6", "Did you mean qwen3-0.6b"),
        ("/no/such/folder", "`fleetctl models` lists what there is."),
    ],
)
async def test_the_hint_is_about_the_compressor_that_was_asked_for(named: str, hint: str) -> None:
    fake = FakeCompressing()
    fake.trouble = SkipCompression("no_compressor", f"No machine can score prompts with {named} now.")
    _, reply, _ = await asked({"prompt": TEXT, "compressor_model": named}, fake)
    assert reply["error"]["param"] == "compressor_model"
    assert hint in reply["error"]["hint"]
    assert "smollm2" not in reply["error"]["hint"]


async def test_a_stopping_daemon_takes_no_new_work() -> None:
    fake = FakeCompressing()
    stopping = services(compressing=fake, status=lambda: status(draining=True))
    async with serve(stopping) as site, site.client() as session:
        async with session.post("/v1/compress", json={"prompt": TEXT}) as response:
            assert response.status == 503
    assert not fake.passages


async def test_a_scorer_that_dies_is_not_paid() -> None:
    fake = FakeCompressing()
    fake.trouble = EngineDied("The engine died.")
    code, reply, _ = await asked({"prompt": TEXT}, fake)
    assert (code, reply["error"]["code"]) == (502, "engine_died")
    assert fake.closed == ["engine_died"]
