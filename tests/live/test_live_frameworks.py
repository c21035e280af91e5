"""Frameworks that ask for objects and send strict tools, each in its own process, against the default model.

What they return is an object of the class that was asked for, or they fail: so each of them proves that its
way to ask for one is held. They are a hundred megabytes, so these tests are long ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from live_daemon import LiveDaemon

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.one_loop]

BEGIN = """
import json, sys
from typing import Literal
from pydantic import BaseModel, Field

class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]

model = sys.argv[1]
ask = "Invent a person called Ada, who is 36."
limits = {"temperature": 0, "max_tokens": 80}

def told(found):
    assert isinstance(found, Person), found
    print(found.model_dump_json())
"""
PROGRAMS = {
    "instructor, tools": (
        "instructor",
        """
import instructor, openai
messages = [{"role": "user", "content": ask}]
by = instructor.from_openai(openai.OpenAI())
limits |= {"max_retries": 0}
told(by.chat.completions.create(model=model, messages=messages, response_model=Person, **limits))
""",
    ),
    "instructor, schema": (
        "instructor",
        """
import instructor, openai
messages = [{"role": "user", "content": ask}]
by = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
limits |= {"max_retries": 0}
told(by.chat.completions.create(model=model, messages=messages, response_model=Person, **limits))
""",
    ),
    "pydantic-ai, tools": (
        "pydantic_ai",
        """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
agent = Agent(OpenAIChatModel(model), output_type=Person, model_settings=limits)
told(agent.run_sync(ask).output)
""",
    ),
    "pydantic-ai, schema": (
        "pydantic_ai",
        """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
agent = Agent(OpenAIChatModel(model), output_type=NativeOutput(Person), model_settings=limits)
told(agent.run_sync(ask).output)
""",
    ),
    "langchain, schema": (
        "langchain_openai",
        """
from langchain_openai import ChatOpenAI
told(ChatOpenAI(model=model, **limits).with_structured_output(Person, method="json_schema").invoke(ask))
""",
    ),
    "langchain, tools": (
        "langchain_openai",
        """
from langchain_openai import ChatOpenAI
told(ChatOpenAI(model=model, **limits).with_structured_output(Person, method="function_calling").invoke(ask))
""",
    ),
    "openai-agents, schema": (
        "agents",
        """
from agents import Agent, ModelSettings, Runner
agent = Agent(name="A", output_type=Person, model=model, model_settings=ModelSettings(**limits))
told(Runner.run_sync(agent, ask, max_turns=2).final_output)
""",
    ),
    "openai-agents, a required tool": (
        "agents",
        """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI
seen = []

@function_tool
def note(name: str, age: int, mood: Literal["good", "bad"]) -> str:
    "Writes a person down."
    seen.append(Person(name=name, age=age, mood=mood))
    return "noted"

settings = ModelSettings(tool_choice="required", **limits)
chat = OpenAIChatCompletionsModel(model, AsyncOpenAI())
once = {"tool_use_behavior": "stop_on_first_tool"}
agent = Agent(name="A", tools=[note], model=chat, model_settings=settings, **once)
Runner.run_sync(agent, ask, max_turns=2)
told(seen[0])
""",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_framework_gets_an_object_of_its_class(live: LiveDaemon, loaded_smol: str, name: str) -> None:
    module, program = PROGRAMS[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (pip install -e '.[long]'): {name} was NOT tried")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, loaded_smol],
        env={
            **{name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")},
            "OPENAI_BASE_URL": live.base_url,
            "OPENAI_API_KEY": live.key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    person: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert person == {"name": "Ada", "age": 36, "mood": "good"}
