"""An assistant that only calls tools has no content, which not every chat template can render."""

from __future__ import annotations

from typing import Any

import miniature_tokenizers as miniature
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from fleetd.engine.prompt.null_content import needs_content
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import ChatPrompt, Generate

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"city": "Paris"}}}
TURN = "{{ '<|im_start|>' + m.role + '\n' }}"


def rendered(tokenizer: Any, content: str | None) -> str:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "content": "It rains.", "tool_call_id": "c1"},
    ]
    found = prepare(Generate("r", ChatPrompt(messages)), tokenizer, 100_000)
    assert messages[1]["content"] == content
    return str(tokenizer.decode(found.tokens))


def of_template(content: str) -> Any:
    made = miniature.qwen3()
    template = "{% for m in messages %}" + TURN + content + "{{ '<|im_end|>' }}{% endfor %}"
    made._tokenizer.chat_template = template
    return made


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content + '.' }}",
        "{{ m.content.split('</think>')[-1] }}",
        "{% if m.content is defined %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endif %}",
    ],
)
def test_a_template_that_cannot_render_null_is_given_an_empty_text(content: str) -> None:
    made = of_template(content)
    assert needs_content(made)
    assert rendered(made, None) == rendered(made, "")


def test_a_template_that_would_print_none_is_given_an_empty_text() -> None:
    plain = miniature.qwen3()
    made = TokenizerWrapper(
        plain._tokenizer, chat_template=lambda messages, **_: "".join(str(m["content"]) for m in messages)
    )
    assert rendered(made, None) == "HiIt rains."


def test_a_template_that_tells_null_from_an_empty_text_is_given_null() -> None:
    made = of_template("{{ m.content if m.content is defined else 'nothing' }}")
    assert not needs_content(made)
    assert "nothing" in rendered(made, None)
    assert "nothing" not in rendered(made, "")


@pytest.mark.parametrize("family", [miniature.qwen3, miniature.llama3, miniature.gpt_oss, miniature.glm])
def test_a_template_that_takes_null_stays_with_it(family: Any) -> None:
    assert not needs_content(family())


def test_a_template_that_takes_no_tool_calls_at_all_is_left_alone() -> None:
    made = of_template("{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}")
    assert not needs_content(made)
