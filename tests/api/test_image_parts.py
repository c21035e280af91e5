"""Images in requests: every dialect makes the same conversation of them, and what is no image is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from openai_bodies import chat

from fleetd import limits
from fleetd.api.anthropic import bodies as anthropic_bodies
from fleetd.api.anthropic import translate as anthropic
from fleetd.api.generation import images
from fleetd.api.generation.fields import decode
from fleetd.api.http.body import parse
from fleetd.api.ollama import translate as ollama
from fleetd.api.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from fleetd.api.openai import translate as openai
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.api.responses.translate import translate as responses
from fleetd.engine.protocol import IMAGES, ChatPrompt, Generate
from fleetd.errors import FleetError, InvalidValue, PayloadTooLarge, UnsupportedParameter

ONE, OTHER = b"one file", b"other file"


def data(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{data(file)}"


# A dialect's parts: of a text, and of an image.
def openai_part(piece: str | bytes) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "image_url", "image_url": {"url": url(piece), "detail": "high"}}


def responses_part(piece: str | bytes) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "input_text", "text": piece}
    return {"type": "input_image", "image_url": url(piece), "detail": "auto"}


def anthropic_part(piece: str | bytes) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data(piece)}}


def of_openai(*messages: list[str | bytes]) -> Generate:
    given = [{"role": "user", "content": list(map(openai_part, each))} for each in messages]
    return openai.chat(chat(messages=given), "r")[0]


def of_responses(*messages: list[str | bytes]) -> Generate:
    given = [{"role": "user", "content": list(map(responses_part, each))} for each in messages]
    return responses(decode(json.dumps({"input": given}).encode(), ResponsesBody), "r").generate


def of_anthropic(*messages: list[str | bytes]) -> ChatPrompt:
    given = [{"role": "user", "content": list(map(anthropic_part, each))} for each in messages]
    body = {"messages": given, "max_tokens": 9}
    return anthropic.prompt(parse(json.dumps(body).encode(), anthropic_bodies.MessagesBody))


def seen(found: Generate | ChatPrompt) -> list[dict[str, Any]]:
    prompt = found if isinstance(found, ChatPrompt) else found.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.images
    return prompt.messages


@pytest.mark.parametrize(
    ("pieces", "content", "places"),
    [
        ([ONE, "What is it?"], "What is it?", [(0, ONE)]),
        (["Before", ONE, "after"], "Beforeafter", [(6, ONE)]),
        ([ONE, OTHER, "a", "b"], "a\nb", [(0, ONE), (0, OTHER)]),
        (["a", "b", ONE, "c", "d", OTHER], "a\nbc\nd", [(3, ONE), (6, OTHER)]),
        ([ONE], "", [(0, ONE)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", [of_openai, of_responses, of_anthropic])
def test_dialects_agree_where_images_stand(
    dialect: Any, pieces: list[str | bytes], content: str, places: list[tuple[int, bytes]]
) -> None:
    (message,) = seen(dialect(pieces))
    assert (message["role"], message["content"]) == ("user", content)
    assert [tuple(each) for each in message[IMAGES]] == places


@pytest.mark.parametrize("dialect", [of_responses, of_anthropic])
def test_messages_that_become_one_keep_their_images_in_place(dialect: Any) -> None:
    (message,) = seen(dialect([ONE, "first"], ["second", OTHER]))
    assert message["content"] == "first\nsecond"
    assert [tuple(each) for each in message[IMAGES]] == [(0, ONE), (12, OTHER)]


def test_ollama_has_images_before_the_text() -> None:
    asked = {"role": "user", "content": "What is it?", "images": [data(ONE), data(OTHER)]}
    talk = ollama.chat(msgspec.convert({"model": "m", "messages": [asked]}, OllamaChatBody), "r")
    single = {"model": "m", "prompt": "What is it?", "images": [data(ONE), data(OTHER)]}
    text = ollama.generate(msgspec.convert(single, OllamaGenerateBody), "r")
    assert seen(talk) == seen(text) == seen(of_openai([ONE, OTHER, "What is it?"]))


def test_a_raw_prompt_has_no_place_for_images() -> None:
    with pytest.raises(UnsupportedParameter, match="raw prompt"):
        ollama.generate(
            msgspec.convert(
                {"model": "m", "prompt": "x", "raw": True, "images": [data(ONE)]}, OllamaGenerateBody
            ),
            "r",
        )


def test_a_plain_url_serves_where_clients_send_one() -> None:
    part = {"type": "image_url", "image_url": url(ONE)}
    (found,) = openai.chat(chat(messages=[{"role": "user", "content": [part]}]), "r")
    assert seen(found)[0][IMAGES] == [(0, ONE)]


@pytest.mark.parametrize(
    "given",
    [
        *("http://169.254.169.254/latest", "https://example.org/a.png", "file:///etc/passwd", "ftp://x/y"),
        *("HTTP://x", "//x/y", "/etc/passwd", "gopher://x"),
    ],
)
def test_addresses_are_never_fetched(given: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        images.from_url(given, "messages[0].content[0].image_url")
    assert refused.value.message == "messages[0].content[0].image_url: addresses of images are not fetched."
    assert "data:image/png;base64" in refused.value.hint


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, InvalidValue),
        ("", InvalidValue),
        ("data:", InvalidValue),
        ("data:image/png,abc", InvalidValue),
        ("data:image/png;base64,", InvalidValue),
        ("data:image/png;base64,not base64!", InvalidValue),
        ("data:image/png;base64,\u00e4hnlich", InvalidValue),
        ("data:image/png;base64,aGk", InvalidValue),
        (f"data:image/png;base64,{'A' * (limits.IMAGE_BYTES * 4 // 3 + 8)}", PayloadTooLarge),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_file_is_refused(given: str | None, kind: type[FleetError]) -> None:
    with pytest.raises(kind) as refused:
        images.from_url(given, "here")
    assert refused.value.param == "here"


def test_line_breaks_in_base64_are_no_error() -> None:
    whole = data(bytes(range(256)))
    broken = "\r\n".join(whole[at : at + 76] for at in range(0, len(whole), 76))
    assert images.from_base64(broken, "here") == bytes(range(256))


@pytest.mark.parametrize("line", [limits.HTTP_BODY_BYTES, 76])
def test_the_largest_file_is_taken_and_a_byte_more_is_not(line: int) -> None:
    """Padding and line breaks were counted as bytes of the file."""
    largest = bytes(limits.IMAGE_BYTES)
    whole = data(largest)
    assert (
        images.from_base64("\n".join(whole[at : at + line] for at in range(0, len(whole), line)), "here")
        == largest
    )
    with pytest.raises(PayloadTooLarge):
        images.from_base64(data(largest + b"."), "here")


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_users_send_images(role: str) -> None:
    talk = [{"role": role, "content": [openai_part(ONE)]}, {"role": "user", "content": "hi"}]
    with pytest.raises(UnsupportedParameter) as refused:
        openai.chat(chat(messages=talk), "r")
    assert "a user's messages" in refused.value.hint


def test_too_many_images_are_refused() -> None:
    with pytest.raises(InvalidValue, match=f"{limits.IMAGES + 1} images"):
        of_openai([ONE] * (limits.IMAGES + 1))


def test_images_travel_to_the_engine_as_they_are() -> None:
    found = of_openai(["a", ONE])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Generate)
    assert isinstance(again.prompt, ChatPrompt)
    assert again.prompt.messages[0][IMAGES] == [[1, ONE]]
