"""From messages to token ids: the model's chat template, sandboxed, and the state the answer starts in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jinja2
import msgspec
from msgspec.structs import replace

from fleetd.engine.answer.answer_parts import Channel
from fleetd.engine.answer.tool_formats import tools_by_grammar
from fleetd.engine.grammar.answer_grammar import AnswerForm
from fleetd.engine.grammar.grammars import Grammars, held_tool
from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.prompt import chat_template, contents, shown_tools
from fleetd.engine.prompt.contents import NotShown
from fleetd.engine.prompt.control_tokens import ControlTokens, Rendered, control_tokens
from fleetd.engine.prompt.kept_tokens import (
    NotSparse,
    Range,
    dropped_of_messages,
    gaps_of,
    kept_tokens,
)
from fleetd.engine.prompt.null_content import with_content
from fleetd.engine.prompt.template_turns import own_system, template_needs
from fleetd.engine.protocol import (
    THINKING_SWITCHES,
    ChatPrompt,
    Generate,
    Message,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from fleetd.engine.vision.image_reader import ImageReader
from fleetd.engine.vision.prompt_images import PromptImages, without_images
from fleetd.errors import BadRequest, ContextLengthExceeded, InvalidValue, UnsupportedParameter
from fleetd.models.chat_templates import DEFAULT, TOOL_USE
from fleetd.models.images import no_images
from fleetd.text import too_long

# What a publisher's template raises where it meets what its author did not think of.
_TEMPLATE_ERRORS = (
    TypeError,
    KeyError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    MemoryError,
)


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A request whose prompt is token ids."""

    #: Without files of images, which ``images`` has as long as they are needed.
    request: Generate
    tokens: list[int]
    #: The channel in which the answer begins.
    initial: Channel = "content"
    #: The tools that the answer may call.
    tools: list[dict[str, Any]] | None = None
    #: The prompt shows tools to a model whose chat template knows none.
    tools_by_grammar: bool = False
    #: Indices of the tokens that the request's Keep leaves, ascending; None if all tokens are read.
    kept: list[int] | None = None
    #: Why a Keep of the request is not followed; "" if it is, or there is none.
    dense_reason: str = ""
    #: The result of ``contents.borders`` for a chat; empty if it was not asked for or not found.
    borders: Sequence[int] = ()
    #: What the answer is held to; None: nothing.
    matcher: AnswerMatcher | None = None
    #: The images in the prompt; None if it has none.
    images: PromptImages | None = None
    #: What the prefix cache compares in the place of ``tokens`` if there are images.
    keys: list[int] = []


def prepare(
    request: Generate,
    tokenizer: Any,
    vocab_size: int,
    *,
    borders: bool = False,
    model: str = "This model",
    grammars: Grammars | None = None,
    images: ImageReader | None = None,
    imageless: str = "",
    image_seen: Callable[[], None] = lambda: None,
) -> PreparedPrompt:
    """Render and tokenize, and make what holds the answer to its form. Runs outside the compute thread.

    Args:
        borders: find where a chat's messages end.
        grammars: of the model; None: made anew if the answer has a form.
        images: what the model reads images with; None: it reads none.
        imageless: why not, as a sentence; "" if it is a model for text.
        image_seen: called after each image, which may take seconds.

    Raises:
        BadRequest: no template, a template that rejects the messages, an empty prompt.
        InvalidValue: a token id outside the vocabulary, in the prompt or in ``logit_bias``.
        FleetError: what ``Grammars.matcher`` raises. Also what ``image_seen`` raises.
    """
    match request.prompt:
        case TokenPrompt(tokens):
            wrong = next((t for t in tokens if not 0 <= t < vocab_size), None)
            if wrong is not None:
                raise InvalidValue(
                    f"Token id {wrong} is outside the vocabulary of {vocab_size}.", param="prompt"
                )
            prepared = PreparedPrompt(request, list(tokens))
            if request.keep is not None:
                prepared = replace(prepared, dense_reason="Token ids have no text to keep parts of.")
        case TextPrompt(text):
            prepared = PreparedPrompt(request, list(tokenizer.encode(text)))
            if request.keep is not None:
                gaps = gaps_of(request.keep.parts.get(0, [(0, len(text))]), len(text))
                tokens = prepared.tokens
                prepared = _follow(
                    prepared, lambda: _offsets(tokenizer, text, tokens, special=True), lambda: gaps
                )
        case ChatPrompt():
            if images is None and request.prompt.images:
                raise no_images(model, "messages", imageless)
            tools = _offered_tools(request.prompt, tokenizer, model)
            prepared = _chat(
                request,
                request.prompt,
                tokenizer,
                tools,
                borders=borders,
                model=model,
                reader=images,
                image_seen=image_seen,
            )
    outside = next((t for t in request.sampling.logit_bias if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise InvalidValue(
            f"Token id {outside} is outside the vocabulary of {vocab_size}.", param="logit_bias"
        )
    check_ids(prepared.tokens, vocab_size)
    if not prepared.tokens:
        raise BadRequest("The prompt is empty.", hint="Send at least one token.", param="prompt")
    form = None if request.count_only else _form(prepared)
    if form is None:
        return prepared
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise UnsupportedParameter(
                f"{name} has no meaning for an answer with a form: it ends where the form does.",
                hint="Leave it out.",
                param=name,
            )
    grammars = grammars or Grammars(tokenizer, vocab_size)
    return replace(prepared, matcher=grammars.matcher(form, chat=isinstance(request.prompt, ChatPrompt)))


def _form(prepared: PreparedPrompt) -> AnswerForm | None:
    """What the answer is held to; None if it may be anything that the model says."""
    request, prompt = prepared.request, prepared.request.prompt
    if not isinstance(prompt, ChatPrompt) or not prepared.tools:
        if request.constraint is None:
            return None
        return AnswerForm(
            request.constraint,
            (),
            must_call=False,
            parallel=False,
            begins=prepared.initial,
            may_think=_may_think(prompt),
        )
    must_call = prompt.tool_choice not in ("auto", "none")
    held = request.constraint is not None or must_call or prompt.strict_tools or prepared.tools_by_grammar
    if not held:
        return None
    # A model that was not trained with tools writes call after call if it may.
    once = isinstance(prompt.tool_choice, dict) or prepared.tools_by_grammar
    return AnswerForm(
        request.constraint,
        [held_tool(each["function"], prompt.strict_tools) for each in prepared.tools],
        must_call=must_call,
        parallel=prompt.parallel_calls and not once,
        begins=prepared.initial,
        may_think=_may_think(prompt),
    )


def _may_think(prompt: Prompt) -> bool:
    """False if the client has switched thinking off."""
    switches = prompt.template_kwargs if isinstance(prompt, ChatPrompt) else {}
    return all(switches.get(name) is not False for name in THINKING_SWITCHES)


def check_ids(tokens: Iterable[int], vocab_size: int) -> None:
    """Raises BadRequest if a tokenizer made an id that the model has no embedding for.

    Fine-tuned models have such: a tokenizer that got more tokens, and weights that did not.
    """
    if (highest := max(tokens, default=0)) >= vocab_size:
        raise BadRequest(
            f"The model's tokenizer makes the token id {highest} of this text, and its weights have "
            f"{vocab_size} tokens: these files do not belong together.",
            hint="Leave out the control token that it stands for, or choose another copy of the model.",
            param="model",
        )


def check_length(prepared: PreparedPrompt, context_tokens: int) -> None:
    """Raises ContextLengthExceeded for a prompt that leaves no room for an answer."""
    request, n = prepared.request, len(prepared.tokens)
    scoring = request.echo and request.max_tokens == 0
    if n + (0 if scoring else 1) > context_tokens:
        raise ContextLengthExceeded(
            too_long.sentence(n, context_tokens),
            hint="Shorten the prompt or choose a model with a longer context.",
            param="messages",
        )


def _chat(
    request: Generate,
    prompt: ChatPrompt,
    tokenizer: Any,
    tools: list[dict[str, Any]] | None,
    *,
    borders: bool,
    model: str,
    reader: ImageReader | None,
    image_seen: Callable[[], None],
) -> PreparedPrompt:
    """Messages as the model's template renders them."""
    controls = control_tokens(tokenizer)
    needs = template_needs(tokenizer, with_tools=bool(tools))
    by_grammar = tools_by_grammar(tokenizer)
    # A hash of an id must not be one of a stand-in, which is another one with each rendering.
    messages = needs.with_ids(with_content(prompt.messages, tokenizer))
    images: PromptImages | None = None
    if reader is not None:
        messages, images = PromptImages.of(messages, reader, image_seen)

    def template(messages: list[dict[str, Any]], tools: Any, options: dict[str, Any]) -> str:
        # Here, so that indices of messages stay those of the request all around.
        if by_grammar and prompt.tools:
            messages = shown_tools.history_as_text(messages)
        if by_grammar and tools:
            own = partial(own_system, partial(chat_template.rendered, tokenizer, tools=None, **options))
            messages, tools = shown_tools.with_tools(messages, tools, own), None
        return _templated(tokenizer, needs.arranged(messages), tools, options, images, model)

    def render(messages: Sequence[dict[str, Any]]) -> Rendered:
        return controls.render(template, messages, tools, prompt.template_kwargs)

    rendered = _rendered(partial(render, messages))
    # The template has written the special tokens; a BOS added here would be a second one.
    text = rendered.text
    tokens, offsets = _encoded(tokenizer, text, with_offsets=borders)
    if rendered.spelled:
        tokens, offsets = _without_spelled(controls, tokenizer, rendered, text, tokens, offsets)
    begins = _begins(tokenizer, tokens)
    callable_tools = _callable_tools(prompt, tools)
    shown = by_grammar and bool(tools)
    prepared = PreparedPrompt(request, tokens, begins, callable_tools, tools_by_grammar=shown)
    if images is not None:
        images.find(tokens)
        bare = replace(prompt, messages=list(map(without_images, prompt.messages)))
        prepared = replace(
            prepared, request=replace(request, prompt=bare), images=images, keys=images.keys(tokens)
        )

    def again(messages: list[dict[str, Any]]) -> str:
        return render(messages).text

    if (keep := request.keep) is not None:
        return _follow(
            prepared,
            lambda: offsets or _offsets(tokenizer, text, tokens, special=False),
            lambda: dropped_of_messages(rendered.text, messages, keep.parts, again),
        )
    if borders and offsets is not None:
        # A template may refuse what is put in place of contents: then there are no borders.
        with suppress(Exception):
            if images is not None:
                found = _borders_with_images(rendered.text, prompt, messages, images, offsets, again)
            else:
                found = contents.borders(rendered.text, messages, prompt.cache_marks, offsets, again)
            return replace(prepared, borders=found)
    return prepared


def _borders_with_images(
    text: str,
    prompt: ChatPrompt,
    messages: list[Message],
    images: PromptImages,
    offsets: list[Range],
    render: Callable[[list[Message]], str],
) -> list[int]:
    """``contents.borders``, of messages with marks of images. Raises as that does."""
    shown = list(map(images.shown, messages))

    def again(given: list[Message]) -> str:
        # The template is given images where a content stands as it was.
        same = zip(messages, shown, given, strict=True)
        return render([own if each is seen else each for own, seen, each in same])

    marks = images.shown_marks(prompt.messages, prompt.cache_marks)
    return contents.borders(text, shown, marks, offsets, again)


def _templated(
    tokenizer: Any,
    messages: list[Message],
    tools: Any,
    options: dict[str, Any],
    images: PromptImages | None,
    model: str,
) -> str:
    """What the chat template makes of messages, with what stands for each image."""
    if images is None:
        return chat_template.rendered(tokenizer, messages, tools, **options)
    parts, order = images.in_parts(messages)
    return images.put_into(chat_template.rendered(tokenizer, parts, tools, **options), order, model)


def _offered_tools(prompt: ChatPrompt, tokenizer: Any, model: str) -> list[dict[str, Any]] | None:
    """The tools that the model may call. Raises BadRequest if it has no template for such a chat."""
    if not tokenizer.has_chat_template:
        raise BadRequest(
            f"{model} has no chat template.",
            hint="Use /v1/completions, or a model tuned for chat.",
            param="model",
        )
    tools = prompt.tools if prompt.tools and prompt.tool_choice != "none" else None
    templates: Any = tokenizer.chat_template
    usable = {DEFAULT, TOOL_USE} if tools and tokenizer.has_tool_calling else {DEFAULT}
    if isinstance(templates, dict) and usable.isdisjoint(templates):
        raise BadRequest(
            f"This model's chat templates are for {', '.join(sorted(templates))[:80]}; none is the default.",
            hint="Offer tools if it has a template for them (tool_use), or use /v1/completions.",
            param="messages",
        )
    return tools


def _callable_tools(prompt: ChatPrompt, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools that an answer may call, of those that the prompt shows."""
    if tools is None or not isinstance(prompt.tool_choice, dict):
        return tools
    return [each for each in tools if each["function"]["name"] == prompt.tool_choice["name"]]


def _rendered(render: Callable[[], Rendered]) -> Rendered:
    """The text that a chat template makes of messages. Raises BadRequest if the template fails."""
    try:
        return render()
    except jinja2.TemplateSyntaxError as error:
        raise BadRequest(
            f"The model's chat template has an error in line {error.lineno}: {error.message}.",
            hint="The messages are not at fault. Get the model's files again, or choose another model.",
            param="model",
        ) from error
    except jinja2.TemplateError as error:
        raise BadRequest(
            f"The model's chat template rejects these messages: {str(error).rstrip('.!')}.",
            hint=_advice(error),
            param="messages",
        ) from error
    except _TEMPLATE_ERRORS as error:
        raise BadRequest(
            f"The model's chat template cannot render these messages ({type(error).__name__}).",
            hint="Check the content of each message.",
            param="messages",
        ) from error


def _without_spelled(
    controls: ControlTokens,
    tokenizer: Any,
    rendered: Rendered,
    text: str,
    tokens: list[int],
    offsets: list[Range] | None,
) -> tuple[list[int], list[Range]]:
    """Tokens of a prompt, and where they are in it, with control tokens that messages spell as plain text.

    Raises InvalidValue where the tokenizer does not tell where a token is.
    """
    try:
        offsets = offsets or _offsets(tokenizer, text, tokens, special=False)
    except NotSparse as reason:
        raise InvalidValue(
            "This spells a control token of the model, which would be read as one.",
            hint=f"Leave it out. {reason}",
            param=rendered.where,
        ) from reason
    return controls.as_text(tokenizer, rendered, tokens, offsets)


def _advice(error: jinja2.TemplateError) -> str:
    """The hint for a template that raises; "" if its author's own message says what to do."""
    if "role" in str(error).lower():
        return "Check the order of the roles."
    # Others are Jinja's own, as of a field that is missing.
    return "" if type(error) is jinja2.TemplateError else "Check the content of each message."


def _follow(
    prepared: PreparedPrompt, offsets: Callable[[], list[Range]], gaps: Callable[[], list[Range]]
) -> PreparedPrompt:
    """Which tokens are kept when the ranges ``gaps()`` of the text are dropped, or why all are."""
    try:
        kept = kept_tokens(offsets(), gaps())
    except (NotSparse, NotShown) as reason:
        return replace(prepared, dense_reason=str(reason))
    except Exception as error:
        # Templates and tokenizers are others' code; the prompt itself has gone through both.
        return replace(prepared, dense_reason=f"Its parts could not be found ({type(error).__name__}).")
    return replace(prepared, kept=kept)


def _encoded(tokenizer: Any, text: str, *, with_offsets: bool) -> tuple[list[int], list[Range] | None]:
    """The tokens of a rendered prompt, and each one's characters if they are wanted and cost nothing more."""
    whole: Any = getattr(tokenizer, "_tokenizer", None)
    if with_offsets and getattr(whole, "is_fast", False):
        from transformers import PreTrainedTokenizerBase

        # A class that encodes in its own way may not call what tells the characters.
        if type(whole).encode is PreTrainedTokenizerBase.encode:
            found = whole(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(found["input_ids"]), [(int(a), int(b)) for a, b in found["offset_mapping"]]
    return list(tokenizer.encode(text, add_special_tokens=False)), None


def _offsets(tokenizer: Any, text: str, tokens: list[int], *, special: bool) -> list[Range]:
    """Each token's characters. Raises NotSparse if the tokenizer cannot tell."""
    whole = tokenizer._tokenizer
    if not getattr(whole, "is_fast", False):
        raise NotSparse("The model's tokenizer does not tell where a token's text is.")
    found = whole(text, add_special_tokens=special, return_offsets_mapping=True)
    if list(found["input_ids"]) != tokens:
        raise NotSparse("The model's tokenizer does not give the same tokens with their places.")
    return [(int(start), int(end)) for start, end in found["offset_mapping"]]


def _begins(tokenizer: Any, tokens: list[int]) -> Channel:
    """The channel in which the answer begins: some templates open the reasoning themselves."""
    thinks = tokenizer.has_thinking and not tokenizer.response_initial_state
    if thinks and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens):
        return "reasoning"
    return "content"
