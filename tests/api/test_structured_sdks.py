"""What the libraries of OpenAI, Anthropic and Ollama send for a schema, and how they read the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anthropic
import ollama
import openai
import pydantic
import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, Site, Step, serve_in_thread, services

from fleetd.engine import protocol as p
from fleetd.requests.job import Job

pytestmark = pytest.mark.one_loop

ASK: list[Any] = [{"role": "user", "content": "Ann is 7."}]
TEXT = '{"name": "Ann", "age": 7, "mood": "fine"}'


class User(pydantic.BaseModel):
    name: str
    age: int
    mood: Literal["fine", "sad"]


ANN = User(name="Ann", age=7, mood="fine")


def answer(job: Job) -> Iterable[Step]:
    """Calls the first tool, if there is one; says the text otherwise, cut off at a limit of one token."""
    request = job.request
    yield p.Accepted(request.id, 5)
    usage = p.Usage(5, 0, 9, 0)
    if isinstance(request.prompt, p.ChatPrompt) and request.prompt.tools:
        name = request.prompt.tools[0]["function"]["name"]
        yield p.ToolCall(request.id, 0, "call_0", name, TEXT)
        yield p.Finished(request.id, "tool_calls", usage)
        return
    cut = request.max_tokens == 1
    yield p.Delta(request.id, TEXT[:8] if cut else TEXT)
    yield p.Finished(request.id, "length" if cut else "stop", usage)


@dataclass
class Served:
    site: Site
    runner: FakeRunner

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.site.url}/v1", api_key=TOKEN, max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.site.url, api_key=TOKEN, max_retries=0)

    @contextmanager
    def ollama(self) -> Iterator[ollama.Client]:
        client = ollama.Client(self.site.url, headers=self.site.auth)
        try:
            yield client
        finally:
            client._client.close()

    def asked(self, where: str) -> dict[str, Any]:
        """The schema of the last request."""
        held = self.runner.jobs[-1].request.constraint
        assert held is not None
        assert (held.kind, held.where) == ("json_schema", where)
        schema: dict[str, Any] = json.loads(held.text)
        assert list(schema["properties"]) == ["name", "age", "mood"]
        return schema

    def strict(self) -> dict[str, str]:
        prompt = self.runner.jobs[-1].request.prompt
        assert isinstance(prompt, p.ChatPrompt)
        return prompt.strict_tools


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    runner = FakeRunner(answer)
    with serve_in_thread(lambda: services(runner)) as site:
        yield Served(site, runner)


def test_openais_chat_is_parsed(served: Served) -> None:
    with served.openai as client:
        found = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=User)
        assert found.choices[0].message.parsed == ANN
        assert served.asked("response_format")["additionalProperties"] is False
        with client.chat.completions.stream(model=MODEL, messages=ASK, response_format=User) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == ANN
        served.asked("response_format")


def test_a_cut_answer_is_told_from_a_whole_one(served: Served) -> None:
    with served.openai as client:
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model=MODEL, messages=ASK, response_format=User, max_tokens=1)
        text: Any = {"format": {"type": "json_schema", "name": "User", "schema": User.model_json_schema()}}
        cut = client.responses.create(model=MODEL, input="x", text=text, max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    form: Any = {"format": {"type": "json_schema", "schema": User.model_json_schema()}}
    with served.anthropic as other:
        said = other.messages.create(model=MODEL, messages=ASK, max_tokens=1, output_config=form)
    assert said.stop_reason == "max_tokens"
    with served.ollama() as third:
        told = third.chat(MODEL, ASK, format=User.model_json_schema(), options={"num_predict": 1})
    assert told.done_reason == "length"


def test_openais_responses_are_parsed_and_say_their_form(served: Served) -> None:
    with served.openai as client:
        found = client.responses.parse(model=MODEL, input="Ann is 7.", text_format=User)
        assert found.output_parsed == ANN
        held = served.asked("text.format")
        form = found.text.format if found.text else None
        assert form is not None
        told = form.to_dict()
        # The schema as it was sent, titles and all.
        sent = told.pop("schema")
        assert told == {"type": "json_schema", "name": "User", "strict": True}
        assert sent["title"] == "User"
        assert sent == held
        plain = client.responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}})
        assert plain.text is not None
        assert plain.text.format is not None
        assert plain.text.format.to_dict() == {"type": "json_object"}
        free = client.responses.create(model=MODEL, input="x", text={"verbosity": "low"})
        assert free.text is not None
        assert free.text.format is not None
        assert free.text.format.to_dict() == {"type": "text"}


def test_openais_strict_tools(served: Served) -> None:
    with served.openai as client:
        found = client.chat.completions.parse(
            model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(User)], parallel_tool_calls=False
        )
        assert found.choices[0].message.tool_calls is not None
        assert found.choices[0].message.tool_calls[0].function.parsed_arguments == ANN
        assert served.strict() == {"User": ""}
        tool: Any = {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "regex", "definition": "a/b"},
        }
        answered = client.responses.create(
            model=MODEL, input="x", tools=[tool, {"type": "function", **STRICT}], parallel_tool_calls=False
        )
    assert served.strict() == {"patch": r"start: /a\/b/", "User": ""}
    assert answered.parallel_tool_calls is False
    first, second = [each.to_dict() for each in answered.tools]
    assert first == tool
    assert second["strict"] is True


STRICT: Any = {"name": "User", "parameters": User.model_json_schema(), "strict": True}


def test_anthropics_messages_are_parsed(served: Served) -> None:
    with served.anthropic as client:
        found = client.messages.parse(model=MODEL, messages=ASK, max_tokens=50, output_format=User)
        assert found.parsed_output == ANN
        served.asked("output_config.format")
        older: Any = {"output_format": {"type": "json_schema", "schema": User.model_json_schema()}}
        client.messages.create(model=MODEL, messages=ASK, max_tokens=50, extra_body=older)
        served.asked("output_format")
        client.messages.create(
            model=MODEL,
            messages=ASK,
            max_tokens=50,
            tools=[{"name": "User", "input_schema": User.model_json_schema(), "strict": True}],
            tool_choice={"type": "tool", "name": "User", "disable_parallel_tool_use": True},
        )
    assert served.strict() == {"User": ""}


def test_ollamas_answers_have_a_schema(served: Served) -> None:
    schema = User.model_json_schema()
    with served.ollama() as client:
        said = client.chat(MODEL, ASK, format=schema).message.content
        assert User.model_validate_json(said or "") == ANN
        assert served.asked("format") == schema
        for raw in (False, True):
            pieces = client.generate(MODEL, "Ann is 7.", format=schema, stream=True, raw=raw)
            assert User.model_validate_json("".join(piece.response for piece in pieces)) == ANN
            served.asked("format")
        client.chat(MODEL, ASK, format="json")
    held = served.runner.jobs[-1].request.constraint
    assert held is not None
    assert held.kind == "json_object"


def test_vllms_fields_by_openais_library(served: Served) -> None:
    schema = User.model_json_schema()
    with served.openai as client:
        for body in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
            client.chat.completions.create(model=MODEL, messages=ASK, extra_body=body)
            held = served.runner.jobs[-1].request.constraint
            assert held is not None
            assert json.loads(held.text) == schema
        choices = {"structured_outputs": {"choice": ["yes", "no"]}}
        client.completions.create(model=MODEL, prompt="x", extra_body=choices)
    held = served.runner.jobs[-1].request.constraint
    assert held is not None
    assert (held.kind, held.text) == ("choice", '["yes","no"]')
