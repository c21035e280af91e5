"""Vectors by real daemons with a real model: by one machine, by several, and whatever happens to them."""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import psutil
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

MINILM, CHAIN = "all-minilm-l6-v2", "chain"
SUBJECTS = ["garden", "market", "library", "railway", "museum", "bakery", "school", "theatre"]
TEXTS = [
    f"In week {n} the {SUBJECTS[n % 8]} had {n} visitors. " + "They came by train." * (n % 5)
    for n in range(160)
]


@pytest.fixture(scope="module")
def fleet(minilm: ModelFolder, live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    """alpha and beta have the model for vectors, and alpha one that chats; gamma has none."""
    models = {"alpha": [minilm.path, live_models / CHAIN], "beta": [minilm.path], "gamma": []}
    with LiveFleet(short_dir / "vectors", models, programs=programs) as found:
        yield found


@pytest.fixture
def loaded(fleet: LiveFleet) -> LiveFleet:
    """All three know each other, and the model is loaded where it is."""
    fleet.revive()
    fleet.until_usable()
    for name, other in (("alpha", "beta"), ("beta", "alpha")):
        fleet.load(name, MINILM, seen_by=other)
        fleet.until_has("gamma", name, MINILM, "loaded")
    return fleet


def sent_post(daemon: LiveDaemon, path: str, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(*daemon.address, timeout=120)
    headers = {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    # A body that is too large is refused before all of it is read.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", path, data, headers)
    return connection


def open_post(daemon: LiveDaemon, path: str, body: Any) -> tuple[Any, http.client.HTTPResponse]:
    connection = sent_post(daemon, path, body)
    return connection, connection.getresponse()


def post(daemon: LiveDaemon, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
    connection, response = open_post(daemon, path, body)
    with contextlib.closing(connection), response:
        reply = json.loads(response.read())
        return response.status, {name.lower(): value for name, value in response.getheaders()}, reply


def embedded(
    daemon: LiveDaemon, texts: list[str] = TEXTS, **fields: Any
) -> tuple[list[bytes], dict[str, str]]:
    body = {"model": MINILM, "input": texts, "encoding_format": "base64", **fields}
    status, headers, reply = post(daemon, "/v1/embeddings", body)
    assert status == 200, reply
    assert [each["index"] for each in reply["data"]] == list(range(len(texts)))
    return [base64.b64decode(each["embedding"]) for each in reply["data"]], headers


def unit(vector: bytes) -> Any:
    found = np.frombuffer(vector, np.float32).astype(np.float64)
    return found / np.linalg.norm(found)


@pytest.fixture(scope="module")
def alone(fleet: LiveFleet) -> list[bytes]:
    """What alpha finds by itself."""
    return embedded(fleet["alpha"], local_only=True)[0]


def test_two_machines_give_the_bytes_of_one(loaded: LiveFleet, alone: list[bytes]) -> None:
    found, headers = embedded(loaded["alpha"])
    kind, _, nodes = headers["x-fleet-plan"].partition("; nodes=")
    # In the order in which they had something.
    assert (kind, set(nodes.split(","))) == ("spread", {"this", "beta"})
    assert headers["x-fleet-exactness"] == "exact"
    assert found == alone


def test_requests_of_one_text_at_once_have_the_bytes_of_a_batch_and_two_machines(
    loaded: LiveFleet,
) -> None:
    """As Open WebUI and others send them: 72 requests, 24 at a time, of long texts, so that some wait."""
    texts = [f"{text} " * 7 for text in TEXTS[:72]]
    alone = embedded(loaded["alpha"], texts, local_only=True)[0]

    def one(text: str) -> tuple[bytes, dict[str, str]]:
        found, headers = embedded(loaded["alpha"], [text])
        return found[0], headers

    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(one, texts))
    assert [vector for vector, _ in answers] == alone
    assert {headers["x-fleet-exactness"] for _, headers in answers} == {"exact"}
    assert {headers["x-fleet-plan"] for _, headers in answers} == {"local; nodes=this", "remote; nodes=beta"}


def test_a_trace_and_the_metrics_tell_who_computed_what(loaded: LiveFleet) -> None:
    alpha = loaded["alpha"]
    _, headers = embedded(alpha)
    told = json.loads(_fleetctl(alpha, "trace", headers["x-fleet-request"], "--json"))
    machines = {each["name"]: each for each in told["texts"]["machines"]}
    assert set(machines) == {"this", "beta"}
    assert sum(each["texts"] for each in machines.values()) == told["texts"]["texts"] == len(TEXTS)
    assert sum(each["tokens"] for each in machines.values()) == told["prompt_tokens"]
    assert all(0 < each["computed_s"] <= told["took_s"] for each in machines.values())
    computed = {step["machine"] for step in told["steps"] if step["name"] == "computed"}
    assert computed == {told["machine"], "beta"}
    page = _fleetctl(alpha, "trace", headers["x-fleet-request"])
    assert "beta: " in page
    assert "computed by several machines · exact" in page
    assert headers["x-fleet-request"][-8:] in _fleetctl(alpha, "trace")
    # Of all requests so far; others before this one were counted too.
    counted = [
        line
        for line in alpha.control("GET", "/metrics").splitlines()
        if line.startswith("fleetd_texts_total")
    ]
    assert float(counted[0].rpartition(" ")[2]) >= len(TEXTS)


def test_a_machine_without_the_model_asks_those_that_have_it(loaded: LiveFleet, alone: list[bytes]) -> None:
    found, headers = embedded(loaded["gamma"])
    assert headers["x-fleet-plan"].startswith(("spread; nodes=alpha,beta", "spread; nodes=beta,alpha"))
    assert found == alone


def parts(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def test_a_client_that_leaves_ends_the_work_on_every_machine(loaded: LiveFleet) -> None:
    body = {"model": MINILM, "input": TEXTS * 60, "stream": True}
    connection, response = open_post(loaded["alpha"], "/v1/embeddings", body)
    with contextlib.closing(connection), response:
        next(part for part in parts(response) if part.get("data"))
    until(lambda: all(_idle(loaded[name]) for name in ("alpha", "beta")), 60)


def test_others_see_that_a_machine_computes_vectors_for_another(loaded: LiveFleet) -> None:
    def at_work() -> bool:
        peers = {peer["name"]: peer for peer in loaded["gamma"].status()["fleet"]["peers"]}
        return bool(peers["beta"].get("vectors"))

    body = {"model": MINILM, "input": TEXTS * 60}
    with contextlib.closing(sent_post(loaded["alpha"], "/v1/embeddings", body)):
        until(at_work, 120)
        assert "vectors" in _fleetctl(loaded["gamma"], "peers")
    # The client has left.
    until(lambda: not at_work(), 60)


# Behind those in which beta computes for alpha, which leaves it out for a while after this.
def test_a_machine_that_dies_in_the_middle_costs_no_vector(loaded: LiveFleet, alone: list[bytes]) -> None:
    body = {"model": MINILM, "input": TEXTS, "encoding_format": "base64", "stream": True}
    found: dict[int, bytes] = {}
    connection, response = open_post(loaded["alpha"], "/v1/embeddings", body)
    with contextlib.closing(connection), response:
        for part in parts(response):
            assert "error" not in part, part
            if not found:
                loaded["beta"].process.send_signal(signal.SIGKILL)
            found |= {each["index"]: base64.b64decode(each["embedding"]) for each in part.get("data", ())}
    loaded["beta"].process.wait(60)
    assert [found[number] for number in range(len(TEXTS))] == alone


def _idle(daemon: LiveDaemon) -> bool:
    """True if no engine of the daemon has had a request for longer than there is between two parts."""
    return all(engine["idle_s"] > 2 for engine in daemon.status()["engines"])


def test_what_is_alike_is_near(loaded: LiveFleet) -> None:
    texts = ["A cat sat on the mat.", "A kitten rested on the rug.", "Interest rates rose by a quarter."]
    cat, kitten, rates = map(unit, embedded(loaded["alpha"], texts)[0])
    assert cat @ kitten > 0.5 > 0.3 > cat @ rates


def test_a_text_in_a_batch_has_the_bytes_that_it_has_alone(loaded: LiveFleet, alone: list[bytes]) -> None:
    for number in (0, 8, 133):
        assert embedded(loaded["alpha"], [TEXTS[number]])[0] == [alone[number]]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("x" * 10_000_000, "invalid_value"),
        (["x"] * 100_000, "invalid_value"),
        ("", "invalid_value"),
        ([""], "invalid_value"),
        ([[]], "invalid_value"),
        ([[2**31 - 1]], None),
        ("word " * 100_000, "context_length_exceeded"),
    ],
    ids=["10 MB", "100,000 texts", "empty", "an empty one", "no token", "no such token", "long"],
)
def test_hostile_texts_are_refused_by_type_and_the_next_one_is_answered(
    loaded: LiveFleet, given: Any, code: str | None
) -> None:
    alpha = loaded["alpha"]
    assert embedded(alpha, ["before"])[0]
    before = held_bytes(alpha)
    status, _, reply = post(alpha, "/v1/embeddings", {"model": MINILM, "input": given})
    assert status == 400
    assert code in (None, reply["error"]["code"])
    assert embedded(alpha, ["next"])[0]
    # Refused before anything is computed: what is left of a body of 10 MB is less than some copies of it.
    assert held_bytes(alpha) - before < 64 << 20


def held_bytes(daemon: LiveDaemon) -> int:
    """Memory of a daemon and of its workers."""
    found = 0
    for process in daemon.processes():
        # A short helper of the daemon may have ended meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss
    return found


@pytest.mark.parametrize("given", ["word " * 200_000, "\U0001f408" * 250_000, "a" * 1_000_000])
def test_the_longest_texts_of_a_request_are_read_within_bounds(loaded: LiveFleet, given: str) -> None:
    """Of each only so much is tokenized at once, and its end is left out."""
    alpha = loaded["alpha"]
    before = held_bytes(alpha)
    found, _ = embedded(alpha, [given] * 8, truncate=True, local_only=True)
    assert len(set(found)) == 1
    assert held_bytes(alpha) - before < 512 << 20


def test_what_can_be_read_is_read(loaded: LiveFleet) -> None:
    alpha = loaded["alpha"]
    halves = rb'{"model": "all-minilm-l6-v2", "input": ["cut \ud83d", "\udc00\ud800"]}'
    status, _, reply = post(alpha, "/v1/embeddings", halves)
    assert status == 200, reply
    assert all(math.isfinite(number) for each in reply["data"] for number in each["embedding"])
    assert embedded(alpha, ["word " * 100_000, "\x00", " \n ", "🐈" * 50], truncate=True)[0]


def test_a_model_is_asked_for_what_it_is_for(loaded: LiveFleet) -> None:
    alpha, talk = loaded["alpha"], [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/embeddings", {"model": CHAIN, "input": "x"}),
        ("/api/embed", {"model": CHAIN, "input": "x"}),
        ("/v1/rerank", {"model": MINILM, "query": "x", "documents": ["y"]}),
        ("/v1/chat/completions", {"model": MINILM, "messages": talk}),
        ("/api/chat", {"model": MINILM, "messages": talk}),
        ("/v1/messages", {"model": MINILM, "messages": talk, "max_tokens": 5}),
    ):
        status, _, reply = post(alpha, path, body)
        assert status == 400, (path, reply)
        assert body["model"] in json.dumps(reply)
    status, _, _ = post(loaded["gamma"], "/v1/chat/completions", {"model": MINILM, "messages": talk})
    assert status == 400


def test_lists_tell_what_a_model_is_for(loaded: LiveFleet) -> None:
    for name in ("alpha", "gamma"):
        daemon = loaded[name]
        found = {each["id"]: each["fleet"] for each in daemon.control("GET", "/v1/models")["data"]}
        assert (found[MINILM]["purpose"], found[MINILM]["vector_width"]) == ("embedding", 384)
        assert found[CHAIN]["purpose"] == "chat"
    with ollamas(loaded["alpha"]) as client:
        assert client.show(MINILM).capabilities == ["embedding"]


@contextlib.contextmanager
def ollamas(daemon: LiveDaemon) -> Iterator[ollama.Client]:
    """Ollama's client of a daemon."""
    headers = {"Authorization": f"Bearer {daemon.key}"}
    client = ollama.Client(daemon.base_url.removesuffix("/v1"), headers=headers)
    with client._client:
        yield client


# ---- libraries ---------------------------------------------------------------------------------------------


def test_openais_library(loaded: LiveFleet, alone: list[bytes]) -> None:
    with openai.OpenAI(base_url=loaded["alpha"].base_url, api_key=loaded["alpha"].key) as client:
        # It asks for base64 unless it is told a form.
        reply = client.embeddings.create(model=MINILM, input=TEXTS[:5])
        told = [struct.pack(f"<{len(each.embedding)}f", *each.embedding) for each in reply.data]
        assert told == alone[:5]
        floats = client.embeddings.create(model=MINILM, input=TEXTS[:5], encoding_format="float")
        assert [each.embedding for each in floats.data] == [each.embedding for each in reply.data]
        short = client.embeddings.create(model=MINILM, input="one", dimensions=8).data[0].embedding
        assert len(short) == 8
        assert math.isclose(sum(number * number for number in short), 1.0, rel_tol=1e-5)
        ids = client.embeddings.create(model=MINILM, input=[[101, 2023, 102], [101, 102]])
        assert (len(ids.data), ids.usage.total_tokens) == (2, 5)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=CHAIN, input="one")


def test_ollamas_library(loaded: LiveFleet, alone: list[bytes]) -> None:
    with ollamas(loaded["alpha"]) as client:
        reply = client.embed(MINILM, TEXTS[:3])
        assert [struct.pack("<384f", *each) for each in reply.embeddings] == alone[:3]
        assert reply.prompt_eval_count
        old = client.embeddings(MINILM, TEXTS[0])
        assert struct.pack("<384f", *old.embedding) == alone[0]
        with pytest.raises(ollama.ResponseError):
            client.embed(MINILM, "word " * 1000, truncate=False)


PROGRAMS = {
    "langchain": (
        "langchain_openai",
        """
from langchain_openai import OpenAIEmbeddings
by = OpenAIEmbeddings(model=model, check_embedding_ctx_length=False)
told(by.embed_documents(texts), by.embed_query(texts[0]))
""",
    ),
    "langchain, Ollama": (
        "langchain_ollama",
        """
from langchain_ollama import OllamaEmbeddings
by = OllamaEmbeddings(model=model, base_url=os.environ["OLLAMA_HOST"],
                      client_kwargs={"headers": {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
told(by.embed_documents(texts), by.embed_query(texts[0]))
""",
    ),
    "llama-index": (
        "llama_index.embeddings.openai",
        """
from llama_index.embeddings.openai import OpenAIEmbedding
by = OpenAIEmbedding(model_name=model, api_base=os.environ["OPENAI_BASE_URL"])
told(by.get_text_embedding_batch(texts), by.get_query_embedding(texts[0]))
""",
    ),
    "llama-index, Ollama": (
        "llama_index.embeddings.ollama",
        """
from llama_index.embeddings.ollama import OllamaEmbedding
by = OllamaEmbedding(model_name=model, base_url=os.environ["OLLAMA_HOST"],
                     client_kwargs={"headers": {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
told(by.get_text_embedding_batch(texts), by.get_query_embedding(texts[0]))
""",
    ),
    "litellm": (
        "litellm",
        """
import litellm
ask = {"model": "openai/" + model, "api_base": os.environ["OPENAI_BASE_URL"], "encoding_format": "float"}
found = [each["embedding"] for each in litellm.embedding(input=texts, **ask).data]
told(found, found[0])
""",
    ),
}
BEGIN = """
import json, os, sys
model, texts = sys.argv[1], ["A cat sat on the mat.", "Rates rose."]

def told(documents, query):
    print(json.dumps([list(map(float, each)) for each in (*documents, query)]))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_frameworks_vectors_are_the_daemons(loaded: LiveFleet, name: str) -> None:
    module, program = PROGRAMS[name]
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(module) is not None:
            done = _run_program(loaded["alpha"], BEGIN + program)
            assert done.returncode == 0, done.stderr[-2000:]
            found = json.loads(done.stdout.splitlines()[-1])
            wanted = embedded(loaded["alpha"], ["A cat sat on the mat.", "Rates rose."])[0]
            for each, vector in zip(found, [*wanted, wanted[0]], strict=True):
                assert each == pytest.approx(np.frombuffer(vector, np.float32).tolist(), abs=1e-6)
            return
    pytest.skip(f"{module} is not installed: {name} was NOT tried")


def _run_program(daemon: LiveDaemon, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, MINILM],
        env={
            **{name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")},
            "OPENAI_BASE_URL": daemon.base_url,
            "OPENAI_API_KEY": daemon.key,
            "OLLAMA_HOST": daemon.base_url.removesuffix("/v1"),
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


# ---- the command -------------------------------------------------------------------------------------------


def test_the_command_embeds_lines_and_goes_on_where_it_was(
    loaded: LiveFleet, alone: list[bytes], tmp_path: Path
) -> None:
    source, out = tmp_path / "lines.txt", tmp_path / "out.npy"
    source.write_text("\n".join(TEXTS[:80]))
    _fleetctl(loaded["alpha"], "embed", str(source), "--lines", "-o", str(out))
    source.write_text("\n".join(TEXTS))
    told = _fleetctl(loaded["alpha"], "embed", str(source), "--lines", "-o", str(out), "--json")
    assert json.loads(told)["computed"] == len(TEXTS) - 80
    matrix = np.load(out)
    # A line has no blank at its end or it has: the text is as it stands.
    assert matrix.shape == (len(TEXTS), 384)
    assert matrix.tobytes() == b"".join(alone)


def _fleetctl(daemon: LiveDaemon, *arguments: str) -> str:
    done = daemon.fleetctl(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
