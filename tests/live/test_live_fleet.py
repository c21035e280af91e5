"""Requests in a fleet of real daemons: answered by whichever machine can, whatever happens to the others."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from forked_programs import Programs
from live_daemon import STOP_S, LiveDaemon, frozen, until
from live_fleet import LiveFleet, answer, body, heard, posted, said, stays, view

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

QUICK, CHAIN = "quick", "chain"
HELLO = "Hello there, world!"
COUNTED = [str(number) for number in range(1, 151)]

MakeFleet = Callable[..., LiveFleet]


@pytest.fixture(scope="module")
def chain(live_models: Path) -> Path:
    return live_models / CHAIN


@pytest.fixture(scope="module")
def fleet(live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    """For tests that harm nobody: alpha, which has no model, and beta, which has two."""
    models = [live_models / QUICK, live_models / CHAIN]
    with LiveFleet(short_dir / "calm", {"alpha": [], "beta": models}, programs=programs) as found:
        found.until_usable()
        for model in (QUICK, CHAIN):
            found.load("beta", model, seen_by="alpha")
        yield found


@pytest.fixture(scope="module")
def three(live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    chain = live_models / CHAIN
    models = {"alpha": [], "beta": [chain], "gamma": [chain]}
    # Whatever the logs can tell is in them, and must not be what people wrote.
    debug = {"FLEETD_LOG_LEVEL": "debug"}
    with LiveFleet(
        short_dir / "three", models, settings=dict.fromkeys(models, debug), programs=programs
    ) as found:
        yield found


@pytest.fixture
def trio(three: LiveFleet) -> LiveFleet:
    """alpha asks; beta answers, because it has the model loaded; gamma could, too. Healed before each."""
    # What it has learned of failures leaves a machine out for half a minute; a new alpha has learned nothing.
    three["alpha"].kill()
    three.revive()
    three.until_usable()
    three["gamma"].control("POST", "/fleet/v1/models/unload", {"model": CHAIN})
    three.until_has("alpha", "gamma", CHAIN, "installed")
    three.load("beta", CHAIN, seen_by="alpha")
    until(lambda: three.peers("alpha")["beta"]["running"] == 0)
    return three


def ledger(daemon: LiveDaemon) -> int:
    """Requests that a machine has ever begun to answer."""
    rows: dict[str, Any] = daemon.control("GET", "/fleet/v1/usage")
    return sum(row["requests"] for row in rows["rows"])


@contextlib.contextmanager
def counting(
    asker: LiveDaemon, answering: LiveDaemon, prompt: str = "<count>"
) -> Iterator[Iterator[dict[str, Any]]]:
    """The rest of an answer of which something was said. However fast the model is, it does not come to its
    end by itself: the engine that writes it stands still meanwhile."""
    engine = answering.engine_pid(CHAIN)
    with heard(asker, CHAIN, prompt) as stream:
        events = stream.events()
        next(event for event in events if said(event))
        with frozen(engine):
            yield events


def counter(daemon: LiveDaemon, name: str) -> float:
    lines = daemon.control("GET", "/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


# ---- The same answer as there ----------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": body(QUICK, "What is the capital of France?", max_tokens=6),
    "sampled": body(QUICK, "Tell me about a fox.", max_tokens=6, temperature=0.9, seed=7),
    "logprobs": body(QUICK, "Name a colour.", max_tokens=4, logprobs=True, top_logprobs=3),
    "two choices": body(QUICK, "Why?", max_tokens=4, n=2, temperature=0.8, seed=3),
    "tools": body(CHAIN, "<weather>", tools=[WEATHER]),
    "reasoning": body(CHAIN, "<ponder>"),
    "code points": body(CHAIN, "<utf8>"),
}


def essence(value: Any) -> Any:
    """What is left of an answer without ids and times, and without what depends on what was asked before."""
    passing = {"id", "created", "timings", "prompt_tokens_details"}
    if isinstance(value, dict):
        return {key: essence(item) for key, item in value.items() if key not in passing}
    return [essence(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", REQUESTS)
def test_a_routed_answer_is_the_one_that_the_serving_machine_gives(fleet: LiveFleet, name: str) -> None:
    routed = answer(fleet["alpha"], REQUESTS[name])
    there = answer(fleet["beta"], REQUESTS[name])
    assert (routed[0], there[0]) == (200, 200)
    assert essence(routed[2]) == essence(there[2])
    assert routed[1]["X-Fleet-Plan"] == "remote; nodes=beta"
    assert routed[1]["X-Fleet-Exactness"] == "equivalent"
    assert there[1]["X-Fleet-Plan"] == "local; nodes=this"
    assert there[1]["X-Fleet-Exactness"] == "exact"


@pytest.mark.parametrize("name", REQUESTS)
def test_a_routed_stream_says_what_the_serving_machine_says(fleet: LiveFleet, name: str) -> None:
    request = REQUESTS[name] | {"stream": True, "stream_options": {"include_usage": True}}

    def streamed(daemon: LiveDaemon) -> tuple[dict[int, Any], list[Any]]:
        """Everything said, by choice; the pieces in which it arrives are nobody's promise."""
        found: dict[int, dict[str, Any]] = {}
        usage = []
        with posted(daemon, request) as response:
            assert response.status == 200
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage += [essence(event["usage"])] if event.get("usage") else []
                for piece in event["choices"]:
                    choice = found.setdefault(piece["index"], {"text": "", "thought": "", "calls": ""})
                    delta = piece["delta"]
                    choice["text"] += delta.get("content") or ""
                    choice["thought"] += delta.get("reasoning_content") or ""
                    for call in delta.get("tool_calls") or ():
                        choice["calls"] += call["function"].get("name") or ""
                        choice["calls"] += call["function"].get("arguments") or ""
                    if piece.get("logprobs"):
                        choice.setdefault("logprobs", []).extend(piece["logprobs"]["content"])
                    if piece.get("finish_reason"):
                        choice["reason"] = piece["finish_reason"]
        return found, usage

    routed = streamed(fleet["alpha"])
    assert routed == streamed(fleet["beta"])
    assert all(choice["reason"] for choice in routed[0].values())


def test_the_official_client_is_answered_by_the_other_machine(fleet: LiveFleet) -> None:
    daemon = fleet["alpha"]
    with openai.OpenAI(base_url=daemon.base_url, api_key=daemon.key, max_retries=0, timeout=60) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=CHAIN, messages=[{"role": "user", "content": "<hello>"}], temperature=0
        )
        assert raw.parse().choices[0].message.content == HELLO
        assert raw.headers["X-Fleet-Plan"] == "remote; nodes=beta"
        listed = client.models.list().data
        assert [model.id for model in listed].count(CHAIN) == 1
        (chain,) = [model for model in listed if model.id == CHAIN]
        assert (chain.model_extra or {})["fleet"]["nodes"] == [{"node": "beta", "state": "loaded"}]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hi."}])
        assert caught.value.code == "model_not_found"


def test_what_fleetctl_plans_on_a_machine_without_the_model_is_what_its_chat_does(fleet: LiveFleet) -> None:
    planned = fleet["alpha"].fleetctl("plan", "-m", CHAIN, "--tokens", "50", "--json")
    assert planned.returncode == 0, planned.stderr
    here, best = {}, json.loads(planned.stdout)["options"][0]
    for option in json.loads(planned.stdout)["options"]:
        if option["nodes"] == ["this"]:
            here = option
    assert (best["kind"], best["nodes"], best["chosen"]) == ("remote", ["beta"], True)
    assert best["predicted_s"] > 0
    assert here["code"] == "absent"
    done = fleet["alpha"].fleetctl("chat", "-m", CHAIN, "--json", "--temperature", "0", "<hello>")
    assert json.loads(done.stdout)["plan"] == f"remote; nodes={best['nodes'][0]}"
    refused = fleet["alpha"].fleetctl("plan", "-m", "nobody", "--tokens", "50")
    assert "beta does not have nobody." in refused.stderr


def test_one_request_has_one_story_where_it_was_asked_and_where_it_was_answered(fleet: LiveFleet) -> None:
    alpha, beta = fleet["alpha"], fleet["beta"]
    _, headers, _ = answer(alpha, body(CHAIN, "<hello>"))
    here = alpha.trace(headers["X-Fleet-Request"])
    assert (here["outcome"], here["answered_by"], here["exactness"]) == ("remote", "beta", "equivalent")
    there = here["there"]
    # What the other machine did lies among the steps of the whole request here.
    own = beta.trace(there["id"])
    assert there == {**own, "steps": [], "summary": ""}
    assert {step["name"] for step in own["steps"]} >= {"reading", "writing"}
    assert any(step["machine"] == "beta" for step in here["steps"])
    assert (there["asked_by"], there["outcome"]) == ("alpha", "local")
    assert here["took_s"] >= there["took_s"]
    assert there["ttft_s"] <= here["ttft_s"]
    shown = alpha.fleetctl("trace", headers["X-Fleet-Request"]).stdout
    assert "answered by beta" in shown
    assert there["id"] in shown
    # A step of less than a hundredth is not shown.
    assert "network and rest" in {step["name"] for step in here["steps"]}
    assert "asked by     alpha" in beta.fleetctl("trace", there["id"]).stdout
    told = json.loads(alpha.fleetctl("trace", headers["X-Fleet-Request"], "--json").stdout)
    assert told == here


def test_fleetctl_chat_is_answered_by_the_other_machine(fleet: LiveFleet) -> None:
    def told() -> dict[str, Any]:
        done = fleet["alpha"].fleetctl("chat", "-m", CHAIN, "--json", "--temperature", "0", "<hello>")
        found: dict[str, Any] = json.loads(done.stdout)
        assert (found["content"], found["plan"]) == (HELLO, "remote; nodes=beta")
        return found

    # Headers that leave before it is decided, as on a busy machine, say nothing of it.
    until(lambda: told()["exactness"] == "equivalent")


def test_a_bad_request_is_refused_as_it_would_be_there_and_tried_nowhere_else(fleet: LiveFleet) -> None:
    fallbacks = counter(fleet["alpha"], "fleetd_fallback_total")
    status, _, refusal = answer(fleet["alpha"], body(CHAIN, "x" * 5000 + "<hello>"))
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    there = answer(fleet["beta"], body(CHAIN, "x" * 5000 + "<hello>"))[2]["error"]
    # The hint is each machine's own: it names models that are there.
    assert {**refusal["error"], "hint": "", "message": ""} == {**there, "hint": "", "message": ""}
    assert refusal["error"]["message"].split(" chain takes")[0] == there["message"].split(" chain takes")[0]
    assert counter(fleet["alpha"], "fleetd_fallback_total") == fallbacks


def test_a_client_that_leaves_frees_the_slot_on_the_other_machine(fleet: LiveFleet) -> None:
    before = fleet["beta"].cancelled_so_far()
    with counting(fleet["alpha"], fleet["beta"]):
        assert fleet["beta"].running == 1
    until(lambda: fleet["beta"].running == fleet["alpha"].running == 0)
    # Not because the answer came to its end.
    assert fleet["beta"].cancelled == before + 1


def test_a_request_that_has_to_stay_is_not_sent(fleet: LiveFleet) -> None:
    before = ledger(fleet["beta"])
    status, _, refusal = answer(fleet["alpha"], body(CHAIN, "<hello>", local_only=True))
    assert (status, refusal["error"]["code"]) == (404, "model_not_found")
    assert ledger(fleet["beta"]) == before


# ---- Machines that fail ----------------------------------------------------------------------------------


def test_a_machine_that_is_killed_before_the_first_token_is_replaced_by_another(trio: LiveFleet) -> None:
    with frozen(trio["beta"].engine_pid(CHAIN)), heard(trio["alpha"], CHAIN, "<hello>") as stream:
        assert stream.plan() == "remote; nodes=beta"
        trio["beta"].kill()
        assert stream.text() == HELLO
    story = trio["alpha"].trace(stream.response.headers["X-Fleet-Request"])
    assert (story["answered_by"], story["there"]["outcome"]) == ("gamma", "local")
    assert [(attempt["answered_by"], attempt["outcome"]) for attempt in story["earlier"]] == [
        ("beta", "failed")
    ]
    _, moved = stream.plans()
    assert moved.startswith("remote; nodes=gamma: beta: ")
    assert trio.states("alpha")["beta"] != "usable"
    status, headers, told = answer(trio["alpha"], body(CHAIN, "<hello>"))
    assert (status, headers["X-Fleet-Plan"]) == (200, "remote; nodes=gamma")
    assert told["choices"][0]["message"]["content"] == HELLO


def test_a_machine_that_is_killed_in_mid_answer_ends_it_with_a_typed_error(trio: LiveFleet) -> None:
    before = ledger(trio["gamma"])
    with counting(trio["alpha"], trio["beta"]) as events:
        trio["beta"].kill()
        last = list(events)[-1]
    assert last["error"]["code"] == "peer_lost"
    assert "beta" in last["error"]["message"]
    # Noticed by what the connection tells, not by its silence.
    assert "silent" not in last["error"]["message"]
    # What was said cannot be taken back, so nobody else begins anew.
    assert ledger(trio["gamma"]) == before
    until(lambda: trio["alpha"].running == 0)


def test_a_machine_that_falls_silent_before_the_first_token_is_replaced_in_time(trio: LiveFleet) -> None:
    beta = trio["beta"]
    # Before the machine itself is silent its model is: so it is asked, however late.
    with frozen(beta.engine_pid(CHAIN)), heard(trio["alpha"], CHAIN, "<hello>") as stream:
        assert stream.plan() == "remote; nodes=beta"
        with frozen(beta.process.pid):
            assert stream.text() == HELLO
            assert stream.plans()[-1].startswith("remote; nodes=gamma")
            assert trio.states("alpha")["beta"] in ("quiet", "unreachable", "connecting")
    # It wakes up and is one of them again; what it was asked meanwhile, nobody wants any more.
    trio.until_usable("alpha", "beta")
    until(lambda: trio["beta"].running == 0)


def test_a_machine_that_is_told_to_stop_finishes_what_it_answers(trio: LiveFleet) -> None:
    beta = trio["beta"]
    engine = beta.engine_pid(CHAIN)
    # Long enough to be stopped in the middle, and short enough for a busy machine to end it in DRAIN_S.
    with heard(trio["alpha"], CHAIN, "<count>", max_tokens=900) as stream:
        events = stream.events()
        text = said(next(event for event in events if said(event)))
        # However fast the model is: the answer does not end before the others have seen it.
        with frozen(engine):
            beta.process.send_signal(signal.SIGTERM)
            until(lambda: trio.states("alpha").get("beta") == "draining")
            # Meanwhile others go elsewhere.
            status, headers, _ = answer(trio["alpha"], body(CHAIN, "<hello>"))
            assert (status, headers["X-Fleet-Plan"]) == (200, "remote; nodes=gamma")
        text += "".join(map(said, events))
    assert text.split() == COUNTED * 6
    assert beta.process.wait(STOP_S) == 0
    until(lambda: trio.states("alpha")["beta"] == "unreachable")


def test_a_machine_that_is_told_twice_to_stop_ends_its_answers_with_a_typed_error(trio: LiveFleet) -> None:
    beta = trio["beta"]
    with counting(trio["alpha"], beta) as events:
        beta.process.send_signal(signal.SIGTERM)
        until(lambda: beta.status()["draining"])
        beta.process.send_signal(signal.SIGTERM)
        last = list(events)[-1]
    assert last["error"]["code"] == "draining"
    assert last["error"]["message"] == "This machine is stopping."
    assert beta.process.wait(STOP_S) == 0


def test_a_restarted_machine_is_the_same_one_and_is_used_again(trio: LiveFleet) -> None:
    before = view(trio["beta"])["node_id"]
    trio["beta"].kill()
    until(lambda: trio.states("alpha")["beta"] != "usable")
    trio.start("beta")
    trio.until_usable("alpha", "beta")
    assert view(trio["beta"])["node_id"] == before == trio.peers("alpha")["beta"]["node_id"]
    assert sorted(trio.states("alpha")) == ["beta", "gamma"]
    trio["gamma"].stop()
    until(lambda: trio.states("alpha")["gamma"] != "usable")
    trio.until_has("alpha", "beta", CHAIN)
    assert answer(trio["alpha"], body(CHAIN, "<hello>"))[1]["X-Fleet-Plan"] == "remote; nodes=beta"


# ---- Who may see what ------------------------------------------------------------------------------------


def test_a_machine_that_may_not_see_prompts_never_gets_one(trio: LiveFleet) -> None:
    alpha, beta, gamma = trio
    assert alpha.fleetctl("peers", "prompts", "beta", "no").returncode == 0
    began = ledger(beta), counter(beta, "fleetd_plan_total")
    # All speaks for beta: it is ready, and gamma has to load the model first.
    with heard(alpha, CHAIN, "<hello>") as stream:
        assert stream.text() == HELLO
        assert stream.plan() == "remote; nodes=gamma"
    # Nor when somebody else fails, nor when there is nobody else.
    with frozen(gamma.engine_pid(CHAIN)), heard(alpha, CHAIN, "<hello>") as stream:
        assert stream.plan() == "remote; nodes=gamma"
        gamma.kill()
        assert list(stream.events())[-1]["error"]["code"] == "peer_lost"
    status, _, refusal = answer(alpha, body(CHAIN, "<hello>"))
    assert (status, refusal["error"]["code"]) == (503, "no_machine")
    assert "beta may not see prompts" in refusal["error"]["message"]
    assert (ledger(beta), counter(beta, "fleetd_plan_total")) == began
    assert alpha.fleetctl("peers", "prompts", "beta", "yes").returncode == 0
    assert answer(alpha, body(CHAIN, "<hello>"))[1]["X-Fleet-Plan"] == "remote; nodes=beta"


def test_no_prompt_leaves_a_machine_that_is_set_to_keep_them(make_fleet: MakeFleet, chain: Path) -> None:
    settings = {"alpha": {"FLEETD_FLEET_LOCAL_ONLY": "on"}}
    fleet = make_fleet({"alpha": [], "beta": [chain]}, settings=settings)
    fleet.until_usable()
    fleet.until_has("alpha", "beta", CHAIN)
    status, _, refusal = answer(fleet["alpha"], body(CHAIN, "<hello>"))
    assert (status, refusal["error"]["code"]) == (404, "model_not_found")
    assert ledger(fleet["beta"]) == 0
    # Models may come from others all the same.
    assert fleet["alpha"].fleetctl("models", "pull", CHAIN).returncode == 0
    assert answer(fleet["alpha"], body(CHAIN, "<hello>"))[1]["X-Fleet-Plan"] == "local; nodes=this"


def test_no_prompt_or_answer_is_kept_anywhere_in_the_fleet(trio: LiveFleet) -> None:
    alpha, beta, gamma = trio
    canary = "canary-51b20d-prompt"
    assert answer(alpha, body(CHAIN, f"{canary}<hello>"))[0] == 200
    assert answer(alpha, body(CHAIN, canary * 1000))[0] == 400
    assert answer(alpha, body(CHAIN, canary, temperature=9))[0] == 400
    with frozen(beta.process.pid), heard(alpha, CHAIN, f"{canary}<hello>") as stream:
        beta.kill()
        assert stream.text() == HELLO
    with counting(alpha, gamma, f"{canary}<count>") as events:
        gamma.kill()
        assert list(events)[-1]["error"]["code"] == "peer_lost"
    looks = ("/metrics", "/fleet/v1/status", "/fleet/v1/usage", "/fleet/v1/peers")
    places = {path: json.dumps(alpha.control("GET", path)) for path in looks}
    assert alpha.stop() == 0
    places |= trio.text_left()
    # That the right places are looked at.
    assert sum("peer.connected" in text for text in places.values()) == 3
    assert sum(path.endswith("fleetd.db") for path in places) == 3
    assert [path for path, text in places.items() if canary in text or "lo there" in text] == []


# ---- How they meet, and part -----------------------------------------------------------------------------


@pytest.mark.parametrize("meet", ["static", "mdns"])
def test_machines_meet_by_configured_addresses_and_by_mdns(make_fleet: MakeFleet, meet: str) -> None:
    fleet = make_fleet({"alpha": [], "beta": []}, meet=meet)
    fleet.until_usable()
    (path,) = [path for path in fleet.peers("alpha")["beta"]["paths"] if path["in_use"]]
    assert (path["host"], path["kind"]) == ("127.0.0.1", "loopback")


def test_a_static_peer_that_is_a_stranger_is_not_used(make_fleet: MakeFleet) -> None:
    fleet = make_fleet({"alpha": [], "beta": []}, meet="static", paired=False)
    stays(lambda: not view(fleet["alpha"])["peers"] and not view(fleet["beta"])["peers"], 1.5)


def test_unpairing_ends_a_machine_everywhere_at_once(make_fleet: MakeFleet, chain: Path) -> None:
    fleet = make_fleet({"alpha": [], "beta": [chain], "gamma": []})
    fleet.until_usable()
    fleet.load("beta", CHAIN, seen_by="alpha")
    with counting(fleet["alpha"], fleet["beta"]) as events:
        done = fleet["gamma"].control("POST", "/fleet/v1/unpair", {"peer": "beta"})
        assert done["told"] == ["alpha"]
        until(lambda: all("beta" not in fleet.states(name) for name in ("alpha", "gamma")))
        until(lambda: view(fleet["beta"])["removed_by"] == "gamma")
        # Also what it was computing for one of them.
        last = list(events)[-1]
        assert last["error"]["code"] in ("not_paired", "peer_lost")
        assert "silent" not in last["error"]["message"]
    assert fleet.peers("beta") == {}
    until(lambda: fleet["beta"].running == 0)
    # A restart changes nothing about it.
    until(lambda: not fleet.saved("beta"))
    fleet["beta"].kill()
    fleet.start("beta")
    stays(lambda: "beta" not in fleet.states("alpha") and not fleet.peers("beta"), 1.5)
    assert view(fleet["beta"])["removed_by"] == "gamma"


def test_a_machine_that_was_away_when_it_was_unpaired_stays_out(make_fleet: MakeFleet) -> None:
    fleet = make_fleet({"alpha": [], "beta": []})
    fleet.until_usable()
    fleet["beta"].kill()
    until(lambda: fleet.states("alpha")["beta"] != "usable")
    done = fleet["alpha"].fleetctl("unpair", "beta", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["told"] == []
    fleet.start("beta")
    until(lambda: set(fleet.states("beta").values()) <= {"refused"})
    stays(lambda: "beta" not in fleet.states("alpha"), 1.0)


def test_a_stranger_gets_nothing_from_the_peer_port(fleet: LiveFleet) -> None:
    host, port = fleet.peer_address("beta")
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {fleet['beta'].key}"})
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        connection.getresponse()
    connection.close()
