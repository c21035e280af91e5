"""Predicted times are those of the schedule, played through piece by piece, and of the published formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from nested_fields import changed

from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import LAST_LAYER, SETUP_ROUND_TRIPS, SETUP_S, PrefillSize, timeline
from fleetd.plan.prefill.split import Split, WarmRows, checked

NO_LINK = LinkSpeed(1e18, 0.0)
SHAPE = ModelShape(layers=32, sizes=StateSizes(131072), hidden_bytes=8192)
PROMPT = PrefillSize(SHAPE, tokens=8192, cached=0, chunk=1024)


def split(prompt: PrefillSize, kind: str, cuts: tuple[int, ...], chunk: int) -> Split:
    made = Split(kind, cuts, prompt.shape.layers, prompt.cached, prompt.tokens, chunk)  # type: ignore[arg-type]
    return checked(made)


def machine(speed: PrefillSpeed, link: LinkSpeed) -> HelperSpec:
    return HelperSpec("a", "a", speed, link)


def seconds(prompt: PrefillSize, made: Split, helpers: list[HelperSpec], home: PrefillSpeed) -> float:
    line = timeline(prompt, made, helpers, home)
    steps = (line.agreed_s, line.prefix_s, line.waited_s, line.computed_s, line.exposed_s)
    assert min(steps) >= 0, line
    assert sum(steps) == pytest.approx(line.total_s)
    return line.total_s


# ---- The schedule, played through ------------------------------------------------------------------------


def played(prompt: PrefillSize, made: Split, helpers: list[HelperSpec], home: PrefillSpeed) -> float:
    """The same, one event after another: what the closed form has to agree with."""
    links = [helper.link for helper in helpers]
    speeds = [*(helper.speed for helper in helpers), home]
    port = max(link.bytes_per_s for link in links)
    agreed = SETUP_S + SETUP_ROUND_TRIPS * max(link.rtt_s for link in links)
    free_home = agreed + home.seconds(1.0, prompt.cached, min(16, prompt.tokens - prompt.cached))
    sent = [
        4 * prompt.tokens
        + prompt.shape.sizes.token_bytes * prompt.cached * len(made.layers_of(i)) / prompt.shape.layers
        for i in range(made.helpers)
    ]
    ways = [link.seconds(count) + link.one_way_s for link, count in zip(links, sent, strict=True)]
    begun = agreed + max(*ways, sum(sent) / port)
    return (_layers if made.kind == "layers" else _tokens)(
        prompt, made, links, speeds, begun, free_home, port
    )


def _layers(
    prompt: PrefillSize,
    made: Split,
    links: list[LinkSpeed],
    speeds: list[PrefillSpeed],
    begun: float,
    free_home: float,
    port: float,
) -> float:
    shares = [len(made.layers_of(i)) / prompt.shape.layers for i in range(made.machines)]
    times = [sum(layer_times(prompt)[n] for n in made.layers_of(i)) for i in range(made.machines)]
    last = made.helpers - 1
    free = [begun] * made.helpers + [free_home]
    hidden_free, rows_free = [0.0] * made.helpers, [0.0] * made.helpers
    rows_end = 0.0
    for chunk in made.chunks_of(0):
        arrived = 0.0
        for i in range(made.machines):
            if i == made.helpers and not shares[i]:
                break
            free[i] = max(free[i], arrived) + speeds[i].seconds(times[i], chunk.start, len(chunk))
            if i == made.helpers:
                break
            row = prompt.shape.sizes.token_bytes * shares[i]
            onward = links[i] if i == last else links[i].and_(links[i + 1])
            if i == last and shares[-1]:
                row += prompt.shape.hidden_bytes
            rows_free[i] = max(rows_free[i], free[i]) + links[i].seconds(row * len(chunk))
            rows_end = max(rows_end, rows_free[i] + links[i].one_way_s)
            hidden_free[i] = max(hidden_free[i], free[i]) + onward.seconds(
                2 * prompt.shape.hidden_bytes * len(chunk)
            )
            arrived = hidden_free[i] + onward.one_way_s
    new = prompt.tokens - prompt.cached
    through_port = begun + sum(shares[:-1]) * prompt.shape.sizes.token_bytes * new / port
    return max(*free, rows_end, through_port)


def _tokens(
    prompt: PrefillSize,
    made: Split,
    links: list[LinkSpeed],
    speeds: list[PrefillSpeed],
    begun: float,
    free_home: float,
    port: float,
) -> float:
    row = prompt.shape.sizes.token_bytes / prompt.shape.layers
    work = [speed.total(1.0, made.tokens_of(i), made.chunk) for i, speed in enumerate(speeds)]
    free = [begun] * made.helpers + [0.0]
    home_links, onward_links = [0.0] * made.helpers, [0.0] * made.helpers
    for share in layer_times(prompt):
        arrived = rows_here = 0.0
        for i in range(made.helpers):
            free[i] = max(free[i], arrived) + share * work[i]
            own = made.tokens_of(i)
            home_links[i] = max(home_links[i], free[i]) + links[i].seconds(row * len(own))
            rows_here = max(rows_here, home_links[i] + links[i].one_way_s)
            if i + 1 < made.helpers:
                onward = links[i].and_(links[i + 1])
                onward_links[i] = max(onward_links[i], free[i]) + onward.seconds(
                    row * (own.stop - prompt.cached)
                )
                arrived = onward_links[i] + onward.one_way_s
        free[-1] = max(free[-1], rows_here) + share * work[-1]
    home_s = work[-1]
    sent = prompt.shape.sizes.token_bytes * (made.cuts[-2] - prompt.cached)
    return max(free[-1], free_home + home_s, begun + sent / port + share * work[-1])


def layer_times(prompt: PrefillSize) -> list[float]:
    """The share of the time that each layer takes."""
    each = [1.0] * (prompt.shape.layers - 1) + [prompt.last_layer]
    return [one / sum(each) for one in each]


speeds = st.builds(
    PrefillSpeed,
    token_s=st.floats(1e-5, 1e-1),
    context_s=st.sampled_from([0.0, 1e-8, 1e-6, 1e-4]) | st.floats(0, 1e-4),
    fixed_s=st.floats(0, 1.0),
)
links = st.builds(LinkSpeed, bytes_per_s=st.floats(1e4, 1e11), rtt_s=st.floats(0, 0.2))


@st.composite
def cases(draw: st.DrawFn, kind: str) -> tuple[PrefillSize, Split, list[HelperSpec], PrefillSpeed]:
    helpers = draw(st.lists(st.builds(machine, speeds, links), min_size=1, max_size=3))
    chunk = draw(st.sampled_from([1, 7, 128, 1000]))
    pieces = draw(st.integers(len(helpers) + 1, 60))
    cached = draw(st.integers(0, 5000))
    new = max(1, pieces * chunk - draw(st.integers(0, chunk - 1)))
    layers = draw(st.integers(len(helpers) + 1, 40))
    prompt = PrefillSize(
        ModelShape(
            layers=layers,
            sizes=StateSizes(draw(st.integers(1, 10**6))),
            hidden_bytes=draw(st.integers(1, 10**5)),
        ),
        tokens=cached + new,
        cached=cached,
        chunk=chunk,
        last_layer=draw(st.sampled_from([1.0, LAST_LAYER]) | st.floats(0.01, 1)),
    )
    if kind == "layers":
        inner = draw(
            st.lists(st.integers(1, layers), unique=True, min_size=len(helpers), max_size=len(helpers))
        )
        cuts = (0, *sorted(inner), layers)
    else:
        units = draw(
            st.lists(st.integers(1, pieces - 1), unique=True, min_size=len(helpers), max_size=len(helpers))
        )
        cuts = (cached, *(cached + unit * chunk for unit in sorted(units)), cached + new)
    return prompt, split(prompt, kind, cuts, chunk), helpers, draw(speeds)


@pytest.mark.parametrize("kind", ["layers", "tokens"])
@given(st.data())
def test_the_price_is_what_the_schedule_takes(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    assert seconds(*case) == pytest.approx(played(*case), rel=1e-9)


# ---- What is known of such schedules ---------------------------------------------------------------------

EVEN = PrefillSpeed(token_s=1e-3)


def overhead(prompt: PrefillSize) -> float:
    """Before anybody computes, over links that cost nothing."""
    return SETUP_S + 4 * prompt.tokens / NO_LINK.bytes_per_s


@pytest.mark.parametrize("machines", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 8, 64])
def test_equal_stages_take_m_plus_s_minus_1_of_them(machines: int, chunks: int) -> None:
    prompt = changed(PROMPT, tokens=128 * chunks, layers=12)
    cuts = tuple(12 * i // machines for i in range(machines + 1))
    made = split(prompt, "layers", cuts, 128)
    stage_s = EVEN.seconds(1 / machines, 0, 128)
    took = seconds(prompt, made, [machine(EVEN, NO_LINK)] * (machines - 1), EVEN) - overhead(prompt)
    assert took == pytest.approx((chunks + machines - 1) * stage_s, rel=1e-6)
    speed_up = EVEN.total(1.0, prompt.new, 128) / took
    assert speed_up == pytest.approx(machines * chunks / (chunks + machines - 1), rel=1e-6)


@pytest.mark.parametrize("machines", [2, 3, 4])
def test_tokens_are_shared_with_one_layer_of_waiting_for_each_machine(machines: int) -> None:
    prompt = replace(PROMPT, tokens=128 * 12)
    cuts = tuple(prompt.tokens * i // machines for i in range(machines + 1))
    made = split(prompt, "tokens", cuts, 128)
    took = seconds(prompt, made, [machine(EVEN, NO_LINK)] * (machines - 1), EVEN) - overhead(prompt)
    speed_up = EVEN.total(1.0, prompt.new, 128) / took
    layers = prompt.shape.layers
    assert speed_up == pytest.approx(machines * layers / (layers + machines - 1), rel=1e-6)


@pytest.mark.parametrize(("fast", "share"), [(1, 0.5), (3, 0.75), (7, 0.875)])
def test_unequal_machines_reach_the_sum_of_their_rates(fast: float, share: float) -> None:
    prompt = replace(PROMPT, tokens=128 * 1000)
    made = split(prompt, "layers", (0, int(32 * share), 32), 128)
    took = seconds(prompt, made, [machine(EVEN.times(1 / fast), NO_LINK)], EVEN)
    assert prompt.tokens / took == pytest.approx((1 + fast) / EVEN.token_s, rel=5e-3)


def test_a_link_that_is_the_bottleneck_takes_its_bytes() -> None:
    link = LinkSpeed(1e7)
    made = split(PROMPT, "layers", (0, 16, 32), 128)
    took = seconds(PROMPT, made, [machine(EVEN, link)], EVEN)
    sent = PROMPT.tokens * (PROMPT.shape.sizes.token_bytes / 2 + PROMPT.shape.hidden_bytes)
    assert took == pytest.approx(link.seconds(sent), rel=0.01)
    tokens = split(PROMPT, "tokens", (0, 4096, 8192), 128)
    took = seconds(PROMPT, tokens, [machine(EVEN, link)], EVEN)
    # The first layer has to be computed before its rows can leave, and the last one's rows used at the end.
    edge_s = 2 * EVEN.total(1.0, range(4096), 128) / PROMPT.shape.layers
    assert took - edge_s == pytest.approx(link.seconds(PROMPT.shape.sizes.token_bytes * 4096), rel=0.01)


@pytest.mark.parametrize(("factor", "hidden"), [(0.5, False), (0.9, False), (1.2, True), (3, True)])
def test_all_of_a_prefill_elsewhere_hides_its_rows_from_b_times_p_on(factor: float, hidden: bool) -> None:
    helper = EVEN.times(0.1)
    needed = PROMPT.shape.sizes.token_bytes / helper.token_s  # bytes per token times tokens per second
    made = split(PROMPT, "layers", (0, 32, 32), 128)
    line = timeline(PROMPT, made, [machine(helper, LinkSpeed(factor * needed))], EVEN)
    one_chunk_s = helper.seconds(1.0, 0, 128)
    assert (line.exposed_s <= 1.001 * one_chunk_s) is hidden
    assert line.computed_s == 0.0


def test_only_the_last_chunk_is_exposed_and_less_of_it_in_smaller_chunks() -> None:
    link = LinkSpeed(1.25e9)
    exposed = []
    for chunk in (2048, 512):
        made = split(PROMPT, "layers", (0, 32, 32), chunk)
        line = timeline(PROMPT, made, [machine(EVEN, link)], EVEN)
        assert line.exposed_s == pytest.approx(link.seconds(PROMPT.shape.sizes.token_bytes * chunk))
        exposed.append(line.exposed_s)
    assert exposed[0] == pytest.approx(4 * exposed[1])


def test_a_cached_prefix_is_sent_first_and_only_for_the_layers_that_need_it() -> None:
    prompt, link = replace(PROMPT, cached=4096), LinkSpeed(1e8)
    place = [machine(EVEN, link)]
    half = timeline(prompt, split(prompt, "layers", (0, 16, 32), 512), place, EVEN)
    every = timeline(prompt, split(prompt, "tokens", (4096, 6144, 8192), 512), place, EVEN)
    assert every.prefix_s == pytest.approx(link.seconds(131072 * 4096), rel=1e-3)
    assert half.prefix_s == pytest.approx(every.prefix_s / 2, rel=1e-3)


def test_rows_that_a_helper_still_has_are_not_sent_again() -> None:
    link = LinkSpeed(1e8)
    cold, place = replace(PROMPT, cached=4096), [machine(EVEN, link)]
    there = WarmRows(3072, 0, 16, bytes(8))
    warm = replace(cold, warm=((place[0].node_id, there), ("another machine", there)))
    rows_s = link.seconds(131072 * 3072 / 2)
    for kind, cuts in (("layers", (0, 16, 32)), ("layers", (0, 24, 32)), ("tokens", (4096, 6144, 8192))):
        before, after = (timeline(each, split(each, kind, cuts, 512), place, EVEN) for each in (cold, warm))
        assert after.prefix_s == pytest.approx(before.prefix_s - rows_s, rel=1e-3)
        assert after.total_s < before.total_s
    # Layers that it does not compute now are of no use.
    few = timeline(warm, split(warm, "layers", (0, 8, 32), 512), place, EVEN)
    assert few.prefix_s == pytest.approx(link.seconds(131072 * 1024 / 4), rel=1e-3)


def test_a_round_trip_counts_when_agreeing_and_once_on_the_way() -> None:
    made = split(PROMPT, "layers", (0, 16, 32), 512)
    near, far = (
        seconds(PROMPT, made, [machine(EVEN, replace(NO_LINK, rtt_s=rtt))], EVEN) for rtt in (0.0, 0.1)
    )
    # There with the prompt, back with the first hidden states.
    assert far - near == pytest.approx((SETUP_ROUND_TRIPS + 1) * 0.1, rel=1e-6)


# ---- Running states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "cuts"), [("layers", (0, 32, 32)), ("tokens", (0, 8192, 8192))])
def test_running_states_are_sent_twice_whatever_the_prompts_length(kind: str, cuts: tuple[int, ...]) -> None:
    """150 MB over a link of 1 GB/s: 0.15 s behind the last rows, after those that are sent before the last
    chunk is computed; or spread over the layers."""
    link, slow, fast = LinkSpeed(1e9, 0.0), PrefillSpeed(2000.0), PrefillSpeed(4000.0)
    hybrid = changed(PROMPT, state_bytes=150_000_000, token_bytes=1)
    without = changed(hybrid, state_bytes=0)
    found = [
        seconds(prompt, split(prompt, kind, cuts, 1024), [machine(fast, link)], slow)
        for prompt in (without, hybrid)
    ]
    more = found[1] - found[0]
    # Where tokens are divided, a layer's state travels while the next layer is computed.
    assert more == pytest.approx(0.15 if kind == "layers" else 2 * 0.15 / 32, rel=0.01)


def test_the_states_of_a_cached_prefix_are_sent_to_the_helpers() -> None:
    link, speed = LinkSpeed(1e9, 0.0), PrefillSpeed(4000.0)
    hybrid = changed(PROMPT, cached=4096, state_bytes=100_000_000, token_bytes=1)
    for prompt, expected in ((hybrid, 0.05), (changed(hybrid, state_bytes=0), 0.0)):
        made = split(prompt, "layers", (0, 16, 32), 1024)
        line = timeline(prompt, made, [machine(speed, link)], speed)
        assert line.prefix_s == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("kind", "cuts"), [("layers", (0, 32, 32)), ("tokens", (0, 8192, 8192))])
def test_states_at_earlier_tokens_are_sent_behind_the_rows(kind: str, cuts: tuple[int, ...]) -> None:
    """Those in the last chunk when its end is due; of all that have no row for every token."""
    link, slow, fast = LinkSpeed(1e9, 0.0), PrefillSpeed(2000.0), PrefillSpeed(4000.0)
    hybrid = changed(PROMPT, state_bytes=50_000_000, window_bytes=100_000, window=1000, token_bytes=1)
    hybrid = replace(hybrid, places=(256, 4000, 8000, 8100))
    found = [
        seconds(replace(hybrid, states=states), split(hybrid, kind, cuts, 1024), [machine(fast, link)], slow)
        for states in (0, 2)
    ]
    assert found[1] - found[0] == pytest.approx(2 * 0.15 / (1 if kind == "layers" else 32), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "cuts", "times"),
    # Where layers are divided each helper sends those of its own: after the prompt, at two places, and before
    # the last chunk. Where tokens are, each helper sends those of all layers.
    [("layers", (0, 16, 32, 32), 4), ("tokens", (0, 2048, 4096, 8192), 2 + 3)],
)
def test_all_states_that_helpers_send_pass_one_port(kind: str, cuts: tuple[int, ...], times: int) -> None:
    link, speed = LinkSpeed(1e9, 0.0), PrefillSpeed(1e-9)
    rows = changed(PROMPT, token_bytes=1000, hidden_bytes=1)
    states = changed(rows, state_bytes=10**9, places=(3000, 7000), states=2)
    found = [
        seconds(prompt, split(prompt, kind, cuts, 1024), [machine(speed, link)] * 2, speed)
        for prompt in (rows, states)
    ]
    assert found[1] - found[0] == pytest.approx(times, rel=0.01)


def test_windows_are_no_endless_rows() -> None:
    endless = changed(PROMPT, token_bytes=40_000)
    windows = changed(endless, token_bytes=10_000, window_bytes=30_000, window=1024)
    assert windows.shape.sizes.of(1024) == endless.shape.sizes.of(1024)
    assert windows.shape.sizes.of(PROMPT.tokens) == 10_000 * PROMPT.tokens + 30_000 * 1024
    link, speed = LinkSpeed(1e7, 0.0), PrefillSpeed(1e-3)
    made = split(PROMPT, "layers", (0, 16, 32), 1024)
    first, second = (seconds(prompt, made, [machine(speed, link)], speed) for prompt in (windows, endless))
    assert first < second
