"""Scores are a model's own attention, whatever the architecture and wherever a text is cut; and they find."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from decoded_reports import DecodedReports
from family_params import in_turn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace
from tiny_architectures import OWN, VOCAB, tiny

from eval.kept_facts import TextScorer
from fleetd import limits
from fleetd.compression.document import Document
from fleetd.compression.token_scores import SegmentScores, log_sum_exp, merge
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.protocol import (
    Accepted,
    Failed,
    Finished,
    Prefill,
    Profile,
    Report,
    Score,
    Scored,
    ScoringState,
)
from fleetd.engine.scoring import head_profile, known_profiles, score_guests
from fleetd.engine.scoring.attention_pass import DISTANCE, AttentionPass, AttentionTap, logits_of
from fleetd.engine.scoring.head_profile import NeedleResult, choose, settled
from fleetd.engine.scoring.known_profiles import SEARCH_TOKENS, ProfileStore
from fleetd.engine.scoring.needles import needles
from fleetd.engine.scoring.profile_search import ProfileSearch
from fleetd.engine.scoring.score_guests import ScoreGuests
from fleetd.engine.scoring.scoring_layout import HEAD_TOKENS, LayoutPass, lay_out
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    InvalidValue,
    ModelUnsupported,
    ScorerNotReady,
)
from fleetd.models import digest as digests
from fleetd.models.folder import ModelFolder

pytestmark = pytest.mark.usefixtures("cpu_installed")
TOKENS = [int(t) for t in np.random.default_rng(3).integers(1, VOCAB, 90)]
# Layers with full attention; the others see a window only.
FULL = {
    "llama": [0, 1, 2, 3],
    "qwen3": [0, 1, 2, 3],
    "gemma": [0, 1, 2, 3],
    "olmo2": [0, 1, 2, 3],
    "phi3": [0, 1, 2, 3],
    "glm4": [0, 1, 2, 3],
    "mistral": [1, 3],
    "gemma3_text": [1, 3],
    "smollm3": [0, 1, 2, 3],
    # Between running states: gated delta, short convolutions.
    "qwen3_5": [1, 3],
    "qwen3_5_moe": [1, 3],
    "lfm2": [1, 3],
    "gpt_oss": [1, 3],
    # Rotate keys before queries, of two widths of heads, and with inputs of each layer's own.
    "gemma4": [1, 3],
    "gemma4_moe": [1, 3],
}
PASS = LayoutPass(TOKENS, own=4, count=70, asking=10, first=0)
A = npt.NDArray[Any]


def looked(
    tap: AttentionTap, work: LayoutPass, layers: list[int], *, rotated: bool, chunk: int
) -> AttentionPass:
    """``rotated``: as attention itself rotates what it compares."""
    attention = AttentionPass(tap, work, {n: tap.key_heads(n) for n in layers})
    while not attention.finished:
        attention.step(chunk)
    for layer in layers if rotated else ():
        attention.keys[layer] = turned(tap, layer, attention.keys[layer], work.own)
        asking = len(work.tokens) - work.asking
        attention.queries[layer] = turned(tap, layer, attention.queries[layer], asking)
    return attention


def turned(tap: AttentionTap, layer: int, rows: A, position: int) -> A:
    """Rows (heads, T, D) as a layer rotates them at ``position`` and those after it."""
    return np.array(tap.ropes[layer](mx.array(rows)[None], offset=position)[0])


def attention_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[A, A, float]]:
    """Queries, keys and scale that mlx-lm's own attention computes from TOKENS, layer by layer."""
    seen: list[tuple[A, A, float]] = []
    attention = mx.fast.scaled_dot_product_attention
    rows = [
        number for number, cache in enumerate(make_prompt_cache(model)) if not isinstance(cache, ArraysCache)
    ]

    def spy(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **rest: Any) -> mx.array:
        seen.append((np.array(q[0]), np.array(k[0]), scale))
        return attention(q, k, v, scale=scale, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", spy)
        mx.eval(model(mx.array(TOKENS)[None]))
    return dict(zip(rows, seen, strict=True))


@pytest.mark.parametrize(("architecture", "chunk"), in_turn(sorted(FULL), [90, 13]))
def test_rotated_logits_are_attentions_own(
    architecture: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(architecture)
    whole = attention_of(model, monkeypatch)
    tap = AttentionTap.of(model)
    assert sorted(tap.scales) == FULL[architecture]
    attention = looked(tap, PASS, FULL[architecture], rotated=True, chunk=chunk)
    for layer in FULL[architecture]:
        q, k, scale = whole[layer]
        assert tap.scales[layer] == pytest.approx(scale)
        np.testing.assert_allclose(attention.queries[layer], q[:, -10:], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(attention.keys[layer], k[:, 4:74], rtol=1e-3, atol=1e-4)
    # Looking changes nothing of the model.
    again = attention_of(model, monkeypatch)
    np.testing.assert_array_equal(again[3][0], whole[3][0])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_before_the_rotation_it_is_the_projection_and_its_norm(architecture: str) -> None:
    """The first layer by hand: what a port that forgets q_norm gets wrong."""
    model = tiny(architecture)
    layer = model.model.layers[0]
    x = np.array(model.model.embed_tokens.weight)[TOKENS]

    def rms(rows: A, norm: Any) -> A:
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + norm.eps) * np.array(norm.weight)

    x = rms(x, layer.input_layernorm)

    def heads(projection: str, norm: str) -> A:
        rows = x @ np.array(layer.self_attn[projection].weight).T
        rows = rows.reshape(len(TOKENS), -1, 32).transpose(1, 0, 2)
        return rms(rows, layer.self_attn[norm]) if norm in layer.self_attn else rows

    tap = AttentionTap.of(model)
    attention = looked(tap, PASS, [0], rotated=False, chunk=32)
    np.testing.assert_allclose(attention.queries[0], heads("q_proj", "q_norm")[:, -10:], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(attention.keys[0], heads("k_proj", "k_norm")[:, 4:74], rtol=1e-3, atol=1e-4)


def test_the_cut_of_a_pass_changes_no_byte() -> None:
    tap = AttentionTap.of(tiny("qwen3"))
    whole, cut = (looked(tap, PASS, [0, 2], rotated=True, chunk=chunk) for chunk in (90, 7))
    for layer in (0, 2):
        np.testing.assert_array_equal(whole.queries[layer], cut.queries[layer])
        np.testing.assert_array_equal(whole.keys[layer], cut.keys[layer])


def test_later_layers_are_not_run() -> None:
    model = tiny("llama")
    tap = AttentionTap.of(model)
    before = looked(tap, PASS, [1], rotated=True, chunk=40)
    # Whatever would be computed behind the second layer's keys cannot be called any more.
    for layer in model.model.layers[1:]:
        layer.mlp = SimpleNamespace()
    after = looked(tap, PASS, [1], rotated=True, chunk=40)
    np.testing.assert_array_equal(before.queries[1], after.queries[1])
    with pytest.raises(TypeError):
        looked(tap, PASS, [2], rotated=True, chunk=40)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "kimi_k2"])
def test_attention_that_shows_no_keys_is_refused(architecture: str) -> None:
    with pytest.raises(ModelUnsupported, match="looked into"):
        AttentionTap.of(tiny(architecture, n_routed_experts=None))


def test_first_layer_scores_of_segments_are_one_passs() -> None:
    """In the first layer a key is its token's own, so nothing is lost by cutting but the question's place."""
    tap = AttentionTap.of(tiny("llama"))
    head, text, question = TOKENS[:8], TOKENS[8:80], TOKENS[80:]

    def segment(first: int, end: int) -> SegmentScores:
        before = head if first else []
        own = [*head, *text[:end]] if first == 0 else text[first:end]
        work = LayoutPass([*before, *own, *question], len(before), len(own), len(question), 0)
        attention = looked(tap, work, [0], rotated=False, chunk=32)
        logits = [
            logits_of(q, attention.keys[0][h // 2], tap.scales[0]) for h, q in enumerate(attention.queries[0])
        ]
        starts = np.arange(len(own), dtype=np.int32) + (8 + first if first else 0)
        return SegmentScores.of_logits(starts, starts + 1, np.stack(logits))

    whole = merge([segment(0, 72)])
    cut = merge([segment(40, 72), segment(0, 20), segment(20, 40)])
    np.testing.assert_array_equal(cut.starts, whole.starts)
    np.testing.assert_allclose(cut.values, whole.values, rtol=1e-4)


# ---- Which tokens are computed ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


def test_a_pass_is_head_segment_question(tokenizer: Any) -> None:
    text = "".join(chr(97 + n % 26) for n in range(1000)) + "WHO"
    laid = lay_out(Score("s", text, [(1000, 1003)], segment=(600, 800)), tokenizer, 4096)
    (work,) = laid.passes
    said = [tokenizer.decode([token]) for token in work.tokens]
    assert "".join(said) == text[:HEAD_TOKENS] + text[600:800] + "\n\n" + "WHO"
    assert (work.own, work.count, work.asking) == (HEAD_TOKENS, 200, 3)
    assert laid.starts.tolist() == list(range(600, 800))
    assert laid.ends.tolist() == list(range(601, 801))


def test_segments_share_no_token_and_leave_none_out(tokenizer: Any) -> None:
    text = "some words, é and 😀 too, " * 30
    edges = [0, 1, 20, 333, len(text)]
    found = [
        lay_out(Score("s", text, [(len(text) - 9, len(text))], segment=part), tokenizer, 4096)
        for part in itertools.pairwise(edges)
    ]
    whole = lay_out(Score("s", text, [(len(text) - 9, len(text))]), tokenizer, 4096)
    assert [s for part in found for s in part.starts.tolist()] == whole.starts.tolist()


# In bytes as in BPE of bytes, a character is several tokens that all start at it.
JAPANESE = "東京🗼は日本の首都です。寿司🍣とé、ラーメン🍜が人気です😀。" * 30


@pytest.mark.parametrize("context", [200, 513, 1024])
def test_no_cut_parts_the_tokens_of_a_character(tokenizer: Any, context: int) -> None:
    asks = [(len(JAPANESE) - 9, len(JAPANESE))]
    edges = [0, 1, 333, 600, len(JAPANESE)]
    found = []
    for segment in [(0, 0), *itertools.pairwise(edges)]:
        laid = lay_out(Score("s", JAPANESE, asks, segment=segment), tokenizer, context)
        assert all(len(each.tokens) <= context for each in laid.passes)
        assert [each.first for each in laid.passes[1:]] == [p.first + p.count for p in laid.passes[:-1]]
        found.append([laid.starts[p.first : p.first + p.count] for p in laid.passes])
    whole, *parts = [[each.tolist() for each in passes] for passes in found]
    assert len(whole) > 2
    for passes in (whole, list(itertools.chain(*parts))):
        assert all(a[-1] < b[0] for a, b in itertools.pairwise(passes))
    assert list(itertools.chain(*whole)) == list(itertools.chain(*itertools.chain(*parts)))


class OneCharacter:
    """A tokenizer that makes 100 tokens of a text's first character."""

    is_fast = True

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        spans = [(0, 1)] * 100 + [(at, at + 1) for at in range(1, len(text))]
        return {"input_ids": [1] * len(spans), "offset_mapping": spans}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1] * len(text)


def test_a_character_that_no_pass_holds_is_refused() -> None:
    request = Score("s", "ab?", [(2, 3)])
    assert len(lay_out(request, OneCharacter(), 256).passes) == 1
    with pytest.raises(ContextLengthExceeded, match="character"):
        lay_out(request, OneCharacter(), 64)


def test_what_is_longer_than_a_pass_is_cut_evenly(tokenizer: Any) -> None:
    text = "x" * 3000
    laid = lay_out(Score("s", text, [(2990, 3000)]), tokenizer, 1024)
    assert len(laid.passes) == 4
    assert all(len(each.tokens) <= 1024 for each in laid.passes)
    assert sum(each.count for each in laid.passes) == 2990
    assert max(each.count for each in laid.passes) - min(each.count for each in laid.passes) <= 1


def test_without_a_question_the_end_asks(tokenizer: Any) -> None:
    laid = lay_out(Score("s", "x" * 500), tokenizer, 4096)
    assert (laid.passes[0].count, laid.passes[0].asking) == (436, 64)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Score("s", "abc", [(0, 9)]), InvalidValue),
        (Score("s", "abc", [(2, 1)]), InvalidValue),
        (Score("s", "", []), BadRequest),
        (Score("s", "abc", [(0, 3)]), BadRequest),
    ],
)
def test_what_cannot_be_scored_is_refused(tokenizer: Any, request_: Score, error: type[Exception]) -> None:
    with pytest.raises(error):
        lay_out(request_, tokenizer, 64)


def test_a_text_that_is_all_question_is_refused_with_what_to_do(tokenizer: Any) -> None:
    with pytest.raises(BadRequest, match="besides the question") as refused:
        lay_out(Score("s", "abc", [(0, 3)]), tokenizer, 64)
    assert "`fleetctl compress --question`" in refused.value.hint


def test_a_context_that_holds_too_little_of_a_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ContextLengthExceeded, match="4 tokens is too short"):
        lay_out(Score("s", "abc" * 50, [(0, 3)]), tokenizer, 4)


# ---- Which heads are asked -------------------------------------------------------------------------------


def tried(*attention: list[float], answer: int = 50) -> NeedleResult:
    found = np.full((len(attention), 200), 1e-4, np.float32)
    for head, weights in enumerate(attention):
        for place, weight in enumerate(weights):
            found[head, answer + 20 * place] = weight
    return NeedleResult(found, np.arange(200) == answer)


def test_the_earliest_layer_that_is_good_enough() -> None:
    blind, good, late = [0.0, 1.0, 0.5], [1.0, 0.2], [1.0]
    curve = choose(
        [0, 0, 1, 1, 2], [tried(blind, blind, blind, good, late), tried(blind, blind, blind, good, late)]
    )
    assert [choice.found for choice in curve] == [0.0, 1.0, 1.0]
    assert settled(curve).heads == [(1, 1)]
    assert settled(curve).exit_layer == 2


def test_needles_are_where_they_say() -> None:
    for needle in needles(12, 10):
        assert needle.text[needle.start : needle.end].endswith(".")
        assert needle.text.count(needle.text[needle.start : needle.end]) == 1
    assert needles(3, 10) == needles(3, 10)
    assert len({needle.question for needle in needles(12, 10)}) > 10


# ---- Turns -----------------------------------------------------------------------------------------------


class ScoringBench:
    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.events = DecodedReports()
        kind = options.pop("kind", "llama")
        changes = {"vocab_size": len(tokenizer)}
        if "text_config" in OWN[kind]:
            changes = {**changes, "text_config": OWN[kind]["text_config"] | changes}
        self.model = tiny(kind, **changes)
        self.tokenizer = tokenizer
        settings = {"budget": KvBudget.of(1 << 30, 4096), "context": 2048, **options}
        self.budget, self.context = settings["budget"], settings["context"]
        self.search = ProfileSearch(
            model=self.model,
            tokenizer=tokenizer,
            context_tokens=self.context,
            known=ProfileStore(settings.get("folder")),
            digest=settings.get("digest", ""),
        )
        self.scoring = ScoreGuests(search=self.search, budget=self.budget, emit=self.events.take)

    def begin(self, name: str, text: str = "lorem ipsum " * 60 + "dolor?", **fields: Any) -> None:
        request = Score(name, text, [(len(text) - 6, len(text))], **fields)
        self.scoring.begin(lay_out(request, self.tokenizer, self.context))

    def run(self) -> None:
        while self.scoring.ready:
            self.scoring.turn(256)

    def measure(self) -> int:
        """Search for the profile to the end; how many steps that took."""
        steps = 0
        while self.search.state.left:
            self.search.step(256)
            steps += 1
        return steps

    def of(self, name: str) -> list[Report]:
        return [event for event in self.events if getattr(event, "id", "") == name]


PROFILE = Profile([(1, 0), (1, 3), (2, 1)], 3)


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_profile, "NEEDLES", 2)
    monkeypatch.setattr(head_profile, "SENTENCES", 6)


@pytest.fixture
def bench(tokenizer: Any) -> ScoringBench:
    return ScoringBench(tokenizer)


def test_one_text(bench: ScoringBench) -> None:
    bench.begin("a", profile=PROFILE)
    assert bench.budget.used_bytes > 0
    bench.run()
    accepted, *progress, scored = bench.of("a")
    assert isinstance(accepted, Accepted)
    assert isinstance(scored, Scored)
    assert [p.done for p in progress if isinstance(p, Prefill)] == [256, 512, accepted.prompt_tokens]
    assert scored.tokens == accepted.prompt_tokens
    assert scored.profile == PROFILE
    found = SegmentScores.unpack(scored.scores)
    assert found.log_sums.shape == (3, 6)
    assert merge([found]).values.shape == (720,)
    assert bench.budget.used_bytes == 0


def test_scores_are_softmaxes_of_the_chosen_heads(bench: ScoringBench) -> None:
    """Against all heads' queries and keys of one pass, put together by hand: each query ``DISTANCE`` behind
    each key, so that where a key stands does not matter."""
    bench.begin("a", profile=PROFILE)
    bench.run()
    laid = lay_out(Score("a", "lorem ipsum " * 60 + "dolor?", [(720, 726)]), bench.tokenizer, 2048)
    tap = AttentionTap.of(bench.model)
    attention = looked(tap, laid.passes[0], [1, 2], rotated=False, chunk=99)

    def far(layer: int, rows: A) -> A:
        """Rows (heads, T, D), each turned by itself as the only token of its text."""
        alone = [turned(tap, layer, rows[:, at : at + 1], DISTANCE) for at in range(rows.shape[1])]
        return np.concatenate(alone, axis=1)

    every = np.stack(
        [
            far(layer, attention.queries[layer])[head] @ attention.keys[layer][head // 2].T / np.sqrt(32)
            for layer, head in PROFILE.heads
        ]
    )
    scored = bench.of("a")[-1]
    assert isinstance(scored, Scored)
    found = SegmentScores.unpack(scored.scores)
    np.testing.assert_allclose(found.log_sums, log_sum_exp(every.astype(np.float32)), rtol=1e-4)
    best = np.take_along_axis(every.reshape(18, -1).T, found.pairs.astype(np.int64), axis=1)
    np.testing.assert_allclose(found.logits, best, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("passes", [1, 2])
def test_where_a_token_stands_does_not_matter_by_itself(
    tokenizer: Any, kind: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer a key is its token's own: the same token has the same logits at the front of a text
    as beside the question, and in any pass."""
    monkeypatch.setattr(limits, "SMART_PASS_TOKENS", 300)
    bench = ScoringBench(tokenizer, kind=kind)
    heads = [(0, head) for head in range(2)]
    bench.begin("a", profile=Profile(heads, 1), passes=passes)
    bench.run()
    scored = bench.of("a")[-1]
    assert isinstance(scored, Scored)
    found = SegmentScores.unpack(scored.scores)
    logits = np.empty((len(found.starts), found.pairs.shape[1]), np.float32)
    np.put_along_axis(logits, found.pairs.astype(np.int64), found.logits, axis=1)
    # The text repeats itself every 12 characters, which are tokens.
    assert len(logits) == 720
    for at in range(12):
        same = logits[at::12]
        np.testing.assert_allclose(same, np.broadcast_to(same[:1], same.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("passes", [1, 2])
def test_without_a_question_every_token_is_scored_by_its_surprise(
    bench: ScoringBench, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Against the log-probabilities of plain passes, in nats."""
    monkeypatch.setattr(limits, "SMART_PASS_TOKENS", 300)
    text = "lorem ipsum dolor sit amet " * 30
    request = Score("a", text, without_question=True, profile=PROFILE, passes=passes)
    laid = lay_out(request, bench.tokenizer, bench.context)
    assert len(laid.passes) == passes
    bench.scoring.begin(laid)
    assert bench.budget.used_bytes > 0
    bench.run()
    (scored,) = [event for event in bench.of("a") if isinstance(event, Scored)]
    found = SegmentScores.unpack(scored.scores)
    assert found.log_sums.shape == (1, 1)
    assert found.starts.tolist() == list(range(len(text)))
    expected: list[float] = []
    for each in laid.passes:
        logits = bench.model(mx.array([each.tokens]))[0]
        nats = mx.logsumexp(logits, axis=-1)[:-1] - mx.take_along_axis(
            logits[:-1], mx.array(each.tokens[1:])[:, None], axis=-1
        ).squeeze(-1)
        expected += [1e-4, *nats.tolist()][each.own : each.own + each.count]
    assert np.exp(found.logits[:, 0]) == pytest.approx(np.array(expected), rel=1e-3)
    assert float(np.exp(found.log_sums[0, 0])) == pytest.approx(sum(expected), rel=1e-3)
    assert bench.budget.used_bytes == 0


def test_texts_are_scored_between_running_states(tokenizer: Any, short_search: None) -> None:
    """In turns with another, in chunks of any size, and after a search for the heads."""
    scores = []
    for chunk in (256, 40):
        bench = ScoringBench(tokenizer, kind="qwen3_5")
        for name in "ab":
            bench.begin(name, profile=Profile([(1, 0), (3, 2)], 4))
        while bench.scoring.ready:
            bench.scoring.turn(chunk)
        for name in "ab":
            scored = bench.of(name)[-1]
            assert isinstance(scored, Scored)
            scores.append(SegmentScores.unpack(scored.scores))
        assert bench.budget.used_bytes == 0
        assert bench.measure() > 1
        assert bench.search.state.state in ("ready", "unable")
    for other in scores[1:]:
        np.testing.assert_allclose(other.log_sums, scores[0].log_sums, rtol=1e-5)


@pytest.mark.parametrize("text", ["lorem ipsum " * 60 + "dolor?", JAPANESE], ids=["latin", "japanese"])
def test_several_passes_are_joined(tokenizer: Any, text: str) -> None:
    bench = ScoringBench(tokenizer, context=600)
    bench.begin("a", text, profile=PROFILE)
    bench.run()
    laid = lay_out(Score("a", text, [(len(text) - 6, len(text))]), tokenizer, 600)
    scored = bench.of("a")[-1]
    assert isinstance(scored, Scored)
    found = SegmentScores.unpack(scored.scores)
    assert len(laid.passes) > 1
    assert found.queries == laid.passes[0].asking
    assert found.starts.tolist() == laid.starts.tolist()


def test_more_passes_than_the_context_wants_are_made_if_they_are_long_enough(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "lorem ipsum " * 300 + "dolor?"
    asked = Score("a", text, [(len(text) - 6, len(text))])
    monkeypatch.setattr(limits, "SMART_PASS_TOKENS", 200)
    whole = lay_out(asked, tokenizer, 4096)
    most = len(whole.starts) // 200
    assert len(whole.passes) == 1
    for passes in (1, 2, 3, 10**9):
        laid = lay_out(replace(asked, passes=passes), tokenizer, 4096)
        assert len(laid.passes) == min(passes, most)
        assert laid.starts.tolist() == whole.starts.tolist()


def test_questions_about_one_text_share_its_keys(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are those of a worker that is asked one question after another."""
    monkeypatch.setattr(limits, "SMART_PASS_TOKENS", 300)
    bench = ScoringBench(tokenizer)
    text = " ".join(f"lorem {n} ipsum" for n in range(200))
    documents = [Document.of_text(f"{text}\n\n{question}?") for question in ("dolor", "sit amet", "et")]
    shape = SimpleNamespace(context_tokens=bench.context)
    loaded: Any = SimpleNamespace(search=bench.search, facts=SimpleNamespace(shape=shape))
    found = TextScorer(loaded, PROFILE).scores(documents, passes=3)
    for number, document in enumerate(documents):
        score = Score(str(number), document.text, list(document.questions), passes=3, profile=PROFILE)
        laid = lay_out(score, tokenizer, bench.context)
        assert len(laid.passes) == 3
        bench.scoring.begin(laid)
        bench.run()
        scored = bench.of(str(number))[-1]
        assert isinstance(scored, Scored)
        alone = merge([SegmentScores.unpack(scored.scores)])
        assert alone.starts.tolist() == found[number].starts.tolist()
        np.testing.assert_allclose(found[number].values, alone.values, rtol=1e-3, atol=1e-6)


def test_what_fails_at_the_end_is_told_too(bench: ScoringBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(score_guests, "join", fails)
    bench.begin("a", profile=PROFILE)
    bench.run()
    assert isinstance(bench.of("a")[-1], Failed)
    assert bench.budget.used_bytes == 0


def test_logits_are_reserved_where_they_are_more_than_the_cache(tokenizer: Any) -> None:
    bench = ScoringBench(tokenizer, budget=KvBudget.of(1 << 30, 4))
    bench.begin("a", profile=PROFILE)
    assert bench.budget.used_bytes > 720 * 3 * 6 * 4  # tokens, heads, queries, f32


def test_two_texts_in_turns_and_the_same_again(bench: ScoringBench) -> None:
    bench.begin("a", profile=PROFILE)
    bench.begin("b", profile=PROFILE)
    bench.run()
    order = [event.id for event in bench.events if isinstance(event, Prefill)]
    assert order == ["a", "b"] * 3
    a, b = bench.of("a")[-1], bench.of("b")[-1]
    assert isinstance(a, Scored)
    assert isinstance(b, Scored)
    assert a.scores == b.scores


def test_a_model_that_shows_no_keys_is_known_to_score_nothing_from_then_on(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Also once it is loaded again, so that another model is chosen."""

    def search() -> ProfileSearch:
        model = tiny("kimi_k2", vocab_size=len(tokenizer))
        known = ProfileStore(tmp_path)
        return ProfileSearch(
            model=model, tokenizer=tokenizer, context_tokens=2048, known=known, digest="d" * 64
        )

    first = search()
    assert first.state.state == "unmeasured"
    first.step(256)
    assert first.state.state == "unable"
    later = search()
    assert later.state.state == "unable"
    with pytest.raises(ModelUnsupported, match="cannot be looked into"):
        later.profile()


def test_an_earlier_exit_asks_fewer_heads(bench: ScoringBench) -> None:
    bench.begin("a", profile=PROFILE, exit_layer=2)
    bench.run()
    scored = bench.of("a")[-1]
    assert isinstance(scored, Scored)
    assert scored.scores.heads == 2


def test_cancelled_in_the_middle(bench: ScoringBench) -> None:
    bench.begin("a", profile=PROFILE)
    bench.scoring.turn(64)
    assert bench.scoring.cancel("a")
    assert not bench.scoring.cancel("a")
    assert bench.of("a")[-1] == Finished("a", "cancelled")
    assert (bench.scoring.ready, bench.budget.used_bytes) == (False, 0)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"profile": Profile([(9, 0)], 10)}, "invalid_value"),
        ({"profile": Profile([(1, 4)], 3)}, "invalid_value"),
        ({"profile": Profile([(2, 0)], 2)}, "invalid_value"),
    ],
)
def test_a_foreign_profile_is_refused(bench: ScoringBench, fields: dict[str, Any], code: str) -> None:
    bench.begin("a", **fields)
    (failed,) = bench.of("a")
    assert isinstance(failed, Failed)
    assert failed.code == InvalidValue.code
    assert bench.budget.used_bytes == 0


def test_what_does_not_fit_is_refused(tokenizer: Any) -> None:
    bench = ScoringBench(tokenizer, budget=KvBudget.of(1000, 4096))
    bench.begin("a", profile=PROFILE)
    (failed,) = bench.of("a")
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_memory"


def test_no_text_waits_for_a_search(bench: ScoringBench) -> None:
    """It is refused at once, whatever has been searched already."""
    for part in range(2):
        bench.begin(f"a{part}")
        (failed,) = bench.of(f"a{part}")
        assert isinstance(failed, Failed)
        assert failed.code == ScorerNotReady.code
        assert (bench.scoring.ready, bench.budget.used_bytes) == (False, 0)
        bench.search.step(64)
    # One that brings a profile needs none.
    bench.begin("b", profile=PROFILE)
    bench.run()
    assert isinstance(bench.of("b")[-1], Scored)


@pytest.mark.usefixtures("short_search")
def test_a_search_tells_how_much_is_left_of_it(bench: ScoringBench) -> None:
    assert bench.search.state == ScoringState("unmeasured", SEARCH_TOKENS)
    left = [bench.search.state.left]
    while bench.search.state.left:
        bench.search.step(256)
        left.append(bench.search.state.left)
    assert left == sorted(left, reverse=True)
    assert bench.search.state == ScoringState("unable")


@pytest.mark.usefixtures("short_search")
def test_a_model_that_looks_nothing_up_says_so(bench: ScoringBench) -> None:
    """A random model finds no needles: it is told with figures, and nothing is left behind."""
    bench.measure()
    bench.begin("a")
    failed = bench.of("a")[-1]
    assert isinstance(failed, Failed)
    assert failed.code == ModelUnsupported.code
    assert "sentences" in failed.message
    assert bench.budget.used_bytes == 0


def test_a_model_whose_attention_cannot_be_read_says_so(tokenizer: Any) -> None:
    bench = ScoringBench(tokenizer)
    bench.search.model = tiny("deepseek_v3", n_routed_experts=None, vocab_size=len(tokenizer))
    assert bench.measure() == 1
    bench.begin("a")
    failed = bench.of("a")[-1]
    assert isinstance(failed, Failed)
    assert failed.code == ModelUnsupported.code


def test_a_search_that_fails_ends(bench: ScoringBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail again: an idle worker must not try for ever."""

    def fails(*_: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(AttentionPass, "step", fails)
    assert bench.measure() == 1
    bench.begin("a")
    failed = bench.of("a")[-1]
    assert isinstance(failed, Failed)
    assert "no such kernel" in failed.message


@pytest.mark.usefixtures("short_search")
def test_a_search_that_found_no_memory_begins_anew_after_growing_pauses(
    bench: ScoringBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, search, step = 100.0, bench.search, AttentionPass.step
    search.clock = lambda: now_s

    def short(*_: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    monkeypatch.setattr(AttentionPass, "step", short)
    for pause_s in (limits.SEARCH_AGAIN_S, 2 * limits.SEARCH_AGAIN_S):
        search.step(64)
        assert search.due_s == now_s + pause_s
        assert search.state.state == "unmeasured"
        now_s = search.due_s
    monkeypatch.setattr(AttentionPass, "step", step)
    while search.state.left:
        search.step(64)
    assert search.state.state in ("ready", "unable")


DIGEST = "ab" * 32


@pytest.mark.usefixtures("short_search")
def test_a_model_that_looks_nothing_up_is_searched_once(tokenizer: Any, tmp_path: Path) -> None:
    """Also after another load."""
    assert ScoringBench(tokenizer, folder=tmp_path, digest=DIGEST).measure() > 0
    later = ScoringBench(tokenizer, folder=tmp_path, digest=DIGEST)
    assert later.search.state == ScoringState("unable")
    later.begin("a")
    (failed,) = later.of("a")
    assert isinstance(failed, Failed)
    assert failed.code == ModelUnsupported.code


@pytest.mark.usefixtures("short_search")
def test_a_profile_is_found_once_on_a_machine(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model is taken to find enough; what is kept is used by the next load, without a search."""
    monkeypatch.setattr(head_profile, "LEAST_FOUND", 0.0)
    searched: list[bool] = []
    for versions in ({"mlx": "1"}, {"mlx": "1"}, {"mlx": "2"}):
        monkeypatch.setattr(known_profiles, "_versions", lambda versions=versions: versions)
        bench = ScoringBench(tokenizer, folder=tmp_path, digest=DIGEST)
        searched.append(bench.measure() > 0)
        assert bench.search.state == ScoringState("ready")
        bench.begin("a")
        bench.run()
        assert isinstance(bench.of("a")[-1], Scored)
        # The daemon knows it before it loads the model, whatever device it was found on.
        store = ProfileStore(tmp_path)
        assert store.find(DIGEST) == store.find(DIGEST, "cpu") == bench.search.profile()
        assert store.find(DIGEST, "metal") is None
    assert searched == [True, False, True]


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("heads", [[(99, 0)], [(1, 99)], [(3, 0)]], ids=str)
def test_a_kept_profile_that_is_not_this_models_is_not_used(
    tokenizer: Any, tmp_path: Path, heads: list[tuple[int, int]]
) -> None:
    ProfileStore(tmp_path).keep(DIGEST, "cpu", Profile(heads, 3))
    bench = ScoringBench(tokenizer, folder=tmp_path, digest=DIGEST)
    bench.begin("a")
    failed = bench.of("a")[-1]
    assert isinstance(failed, Failed)
    assert failed.code == ScorerNotReady.code
    assert bench.measure() > 0


def test_without_a_digest_nothing_is_kept(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.keep("", "cpu", PROFILE)
    assert store.find("") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_the_embedded_models_profile_is_shipped(embedded_model: ModelFolder) -> None:
    """Under the digest that it is installed with, or a new machine would not score its first prompt."""
    digest = digests.remembered(embedded_model.path, None)
    profile = ProfileStore().find(digest)
    assert profile is not None
    assert profile.heads


def test_profiles_of_another_algorithm_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_profiles, "ALGORITHM", known_profiles.ALGORITHM + 1)
    known_profiles._shipped.cache_clear()
    try:
        assert known_profiles._shipped() == {}
    finally:
        known_profiles._shipped.cache_clear()
