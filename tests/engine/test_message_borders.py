"""Models that cannot take tokens back keep states where messages end and where a client's marks are."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

import miniature_tokenizers
import pytest
import sharing
from turned_scheduler import CHUNK, TinyFamily, Turned, family

from fleetd import limits
from fleetd.api.anthropic import translate
from fleetd.api.anthropic.bodies import MessagesBody
from fleetd.api.http.body import parse
from fleetd.engine.prompt.contents import NotShown, borders
from fleetd.engine.prompt.control_tokens import ControlTokens
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt, prepare
from fleetd.engine.protocol import ChatPrompt, Generate
from fleetd.engine.sequence_state import checkpoints

pytestmark = pytest.mark.usefixtures("cpu_installed")
BLOCK = limits.CHECKPOINT_BLOCK_TOKENS

Message = dict[str, Any]
SYSTEM = {"role": "system", "content": "Answer the user in turn, and say where you looked. " * 12}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"city": "Paris"}}}
FIRST = [SYSTEM, {"role": "user", "content": "Where is the tool? " * 10 + "Here?"}]
ANSWER = {"role": "assistant", "content": "It is in the city."}
SECOND = [*FIRST, ANSWER, {"role": "user", "content": "Which city is that? " * 5 + "Paris?"}]
WITH_RESULT = [
    *FIRST,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": 'Paris, "here"\n' * 10 + "there"},
]
FAMILIES = {
    "qwen3": miniature_tokenizers.qwen3,
    "llama3": miniature_tokenizers.llama3,
    "glm": miniature_tokenizers.glm,
    "gpt_oss": miniature_tokenizers.gpt_oss,
    "pieces": miniature_tokenizers.pieces,
}


def prepared(tokenizer: Any, messages: list[Message], **more: Any) -> PreparedPrompt:
    return prepare(Generate("r", ChatPrompt(messages, **more)), tokenizer, 1 << 20, borders=True)


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def just_before(found: PreparedPrompt, other: PreparedPrompt) -> int:
    """Tokens between where ``other`` departs from ``found`` and the last border of it that serves."""
    shared = common(found.tokens, other.tokens)
    assert shared < len(found.tokens)
    return shared - max(at for at in found.borders if at <= shared)


# ---- Where borders are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [FIRST, SECOND, WITH_RESULT], ids=["first", "second", "result"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_and_the_next_turn_depart_just_behind_a_border(name: str, messages: list[Message]) -> None:
    tokenizer = FAMILIES[name]()
    if name == "pieces":  # it knows neither instructions nor tools
        messages = [message for message in messages if message["role"] == "user"]
    tools = {"tools": [TOOL]} if name == "qwen3" else {}
    found = prepared(tokenizer, messages, **tools)
    edited = [*messages[:-1], {**messages[-1], "content": "Other words?"}]
    assert just_before(found, prepared(tokenizer, edited, **tools)) <= 8
    # The prompt ends in what begins an answer; an answer in the client's words may begin in another way.
    longer = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + " And more?"}]
    assert just_before(found, prepared(tokenizer, longer, **tools)) <= 8


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gpt_oss"])
def test_a_new_session_departs_less_than_a_block_behind_a_border(name: str) -> None:
    tokenizer = FAMILIES[name]()
    tools = {"tools": [TOOL] * 8} if name == "qwen3" else {}
    found = prepared(tokenizer, SECOND, **tools)
    other = prepared(tokenizer, [SYSTEM, {"role": "user", "content": "Another task."}], **tools)
    behind = just_before(found, other)
    assert behind < BLOCK
    assert max(at for at in found.borders if at <= common(found.tokens, other.tokens)) % BLOCK == 0


def test_an_edit_of_a_long_message_departs_about_a_block_behind_what_the_disk_can_have() -> None:
    tokenizer = FAMILIES["qwen3"]()
    long = [*FIRST, ANSWER, {"role": "user", "content": "Which city is that? " * 60}]
    found = prepared(tokenizer, long)
    edited = prepared(tokenizer, [*long[:-1], {"role": "user", "content": "Other words?"}])
    shared = common(found.tokens, edited.tokens)
    on_disk = [at for at in found.borders if at % BLOCK == 0 and at <= shared]
    assert len(found.tokens) - shared > 2 * BLOCK
    assert 0 < shared - max(on_disk) <= BLOCK + 8


def test_a_mark_is_a_border_also_where_the_template_trims() -> None:
    tokenizer = FAMILIES["llama3"]()
    content = f"  {'The user asks. ' * 20}And then a question?"
    chars = content.index("And then")
    found = prepared(tokenizer, [{"role": "user", "content": content}], cache_marks=[(0, chars)])
    other = prepared(tokenizer, [{"role": "user", "content": content[:chars] + "or an answer"}])
    assert just_before(found, other) <= 2


def test_borders_are_found_beside_spelled_control_tokens() -> None:
    tokenizer = FAMILIES["qwen3"]()
    spelling = [SYSTEM, {"role": "user", "content": "What does <|im_end|> mean? " * 4}]
    found = prepared(tokenizer, spelling)
    other = prepared(tokenizer, [SYSTEM, {"role": "user", "content": "And that?"}])
    assert just_before(found, other) <= 8


def test_marks_of_no_such_place_are_left_out() -> None:
    tokenizer = FAMILIES["qwen3"]()
    plain = prepared(tokenizer, FIRST)
    assert prepared(tokenizer, FIRST, cache_marks=[(9, 1), (1, 0), (1, 1 << 40)]) == PreparedPrompt(
        Generate("r", ChatPrompt(FIRST, cache_marks=[(9, 1), (1, 0), (1, 1 << 40)])),
        plain.tokens,
        tools=plain.tools,
        borders=plain.borders,
    )


def test_tokens_are_the_same_with_and_without_borders_and_without_asking_there_are_none() -> None:
    for make in FAMILIES.values():
        tokenizer = make()
        messages = [m for m in SECOND if m["role"] == "user"]
        plain = prepare(Generate("r", ChatPrompt(messages)), tokenizer, 1 << 20)
        assert plain.borders == ()
        assert prepared(tokenizer, messages).tokens == plain.tokens


def test_a_template_that_does_not_show_its_messages_has_no_borders() -> None:
    def forgetful(messages: list[Message]) -> str:
        return "a conversation"

    with pytest.raises(NotShown):
        borders("a conversation", FIRST, [], [(0, 14)], forgetful)


def test_a_template_that_refuses_what_stands_for_contents_leaves_the_prompt_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, render = FAMILIES["qwen3"](), ControlTokens.render
    calls: list[int] = []

    def once(self: ControlTokens, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no such message")
        return render(self, *arguments)

    monkeypatch.setattr(ControlTokens, "render", once)
    found = prepared(tokenizer, FIRST)
    assert len(calls) == 2
    assert found.borders == ()
    assert len(found.tokens) > 100


# ---- What is read again ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


class Chats:
    """A scheduler with a hybrid, and what a chat computes."""

    def __init__(self, family: TinyFamily) -> None:
        self.bench = Turned(family, context_tokens=1 << 13)
        self.tokenizer = miniature_tokenizers.qwen3()
        self.asked = 0

    def new(self, messages: list[Message], **more: Any) -> tuple[list[int], int]:
        """The prompt's tokens, and how many were computed."""
        return self.ask(ChatPrompt(messages, **more))

    def ask(self, prompt: ChatPrompt) -> tuple[list[int], int]:
        name = f"r{self.asked}"
        self.asked += 1
        request = Generate(name, prompt, sharing.GREEDY, max_tokens=1)
        found = prepare(request, self.tokenizer, sharing.VOCAB, borders=True)
        self.bench.scheduler.inbox.put(found)
        self.bench.finish()
        return found.tokens, self.bench.computed(name)


def conversation(last: str) -> list[Message]:
    turns = [
        message
        for turn in range(6)
        for message in ({"role": "user", "content": f"Question {turn}? " * 12}, ANSWER)
    ]
    return [SYSTEM, *turns, {"role": "user", "content": last}]


def test_after_an_edited_last_message_only_it_and_less_than_a_chunk_is_read(qwen3_next: TinyFamily) -> None:
    chats = Chats(qwen3_next)
    first, all_computed = chats.new(conversation("Where is the tool? " * 40))
    assert all_computed == len(first) > 4 * BLOCK
    second, computed = chats.new(conversation("Which tool is it? " * 30))
    assert computed < len(second) - common(first, second) + CHUNK


def test_a_turn_whose_template_goes_on_in_another_way_reads_what_is_new(qwen3_next: TinyFamily) -> None:
    """Without thinking, a prompt ends in an empty thought, which the next turn does not repeat."""
    chats = Chats(qwen3_next)
    quiet = {"enable_thinking": False}
    before = conversation("Where is the tool? " * 30)
    first, _ = chats.new(before, template_kwargs=quiet)
    turn = [*before, ANSWER, {"role": "user", "content": "And then?"}]
    second, computed = chats.new(turn, template_kwargs=quiet)
    shared = common(first, second)
    assert shared < len(first) - 1
    assert computed < len(second) - shared + CHUNK


def test_a_new_session_reads_the_same_instructions_and_tools_from_the_last_block_on(
    qwen3_next: TinyFamily,
) -> None:
    chats = Chats(qwen3_next)
    tools = [TOOL] * 12
    first, _ = chats.new(conversation("Where? " * 180), tools=tools)
    other, computed = chats.new([SYSTEM, {"role": "user", "content": "Another task."}], tools=tools)
    shared = common(first, other)
    by_length = max(at for at in (0, *checkpoints.places(len(first))) if at <= shared)
    assert by_length < shared - BLOCK, "without borders it would be no more"
    assert computed < len(other) - shared + BLOCK


def test_a_cache_control_mark_is_where_the_next_request_goes_on(qwen3_next: TinyFamily) -> None:
    chats = Chats(qwen3_next)

    def asked(question: str, **mark: Any) -> ChatPrompt:
        text = {"type": "text", "text": "The file says: " + "one, two; three. " * 40, **mark}
        more = [{"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": [text, *more]}], "max_tokens": 1}
        return translate.prompt(parse(json.dumps(body).encode(), MessagesBody))

    first, _ = chats.ask(asked("What does it say, and why? " * 40, cache_control={"type": "ephemeral"}))
    second, computed = chats.ask(asked("Is it a list?"))
    shared = common(first, second)
    assert shared > BLOCK + CHUNK
    assert computed < len(second) - shared + CHUNK
