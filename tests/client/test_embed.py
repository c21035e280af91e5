"""`fleetctl embed` and `fleetctl rerank`: what is asked for, what is written, and what a second run skips."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_daemon import FakeDaemon, Reply, Run, data
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.exits import ClientError, Exit
from fleetctl.vectors.corpus import CorpusText, read_corpus
from fleetctl.vectors.vector_files import NpyMatrix, numbers, open_vectors

EMBED, RERANK = "/v1/embeddings", "/v1/rerank"
WIDTH = 3


def vector(seed: int) -> bytes:
    return struct.pack(f"<{WIDTH}f", seed, -seed / 3, 1e-7 * seed)


def model(name: str, purpose: str, state: str = "installed") -> dict[str, Any]:
    return {"id": name, "fleet": {"purpose": purpose, "nodes": [{"node": "this", "state": state}]}}


MODELS = {
    "data": [model("chatty", "chat"), model("cold", "embedding"), model("minilm", "embedding", "loaded")]
}


def reply(*seeds: int, name: str = "minilm", until: int | None = None) -> Reply:
    """A whole answer, or one that breaks off after so many vectors; the last text comes first."""
    said = [": request embd-1\n\n", data({"object": "embedding.part", "loading": "reading", "total": 2})]
    for number in reversed(range(len(seeds))):
        found = base64.b64encode(vector(seeds[number])).decode()
        said.append(data({"object": "embedding.part", "data": [{"index": number, "embedding": found}]}))
    if until is not None:
        return Reply(stream=[*said[: 2 + until], "drop"])
    usage = {"prompt_tokens": 9, "total_tokens": 9}
    last = data({"object": "embedding.part", "model": name, "usage": usage, "plan": "local; nodes=this"})
    return Reply(stream=[*said, last, "data: [DONE]\n\n"])


@pytest.fixture
def vectors(daemon: FakeDaemon) -> FakeDaemon:
    daemon.on("GET", "/v1/models", Reply(MODELS))
    return daemon


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(daemon: FakeDaemon) -> list[list[str]]:
    return [seen.body["input"] for seen in daemon.seen if seen.path == EMBED]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_each_line_has_a_line_of_json_in_their_order(vectors: FakeDaemon, run: Run) -> None:
    vectors.on("POST", EMBED, reply(1, 2))
    done = run("embed", "--lines", home=vectors.home, stdin="one\n\ntwo\n")
    assert done.returncode == Exit.OK
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["embedding"] == pytest.approx(struct.unpack("<3f", vector(1)))
    assert np.array(first["embedding"], np.float32).tobytes() == vector(1)
    assert (second["id"], second["sha256"], second["model"]) == ("stdin:3", sha256("two"), "minilm")
    body = vectors.seen[-1].body
    assert body.pop("part_of")["total"] == 2
    assert body == {"model": "minilm", "input": ["one", "two"], "stream": True, "encoding_format": "base64"}


def test_each_file_is_a_text_and_every_option_reaches_the_daemon(
    vectors: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    vectors.on("POST", EMBED, reply(1))
    options = ["-m", "other", "--query", "--dimensions", "2", "--truncate", "--local-only"]
    done = run("embed", str(tmp_path / "a.txt"), *options, home=vectors.home)
    assert done.returncode == Exit.OK
    assert json.loads(done.stdout)["id"] == str(tmp_path / "a.txt")
    assert vectors.seen[-1].body.pop("part_of")["total"] == 1
    assert vectors.seen[-1].body == {
        "model": "other",
        "input": ["one\ntwo\n"],
        "input_type": "query",
        "dimensions": 2,
        "truncate": True,
        "local_only": True,
        "stream": True,
        "encoding_format": "base64",
    }


def test_all_requests_of_a_run_are_parts_of_one_job(
    vectors: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors.on("POST", EMBED, reply(*range(64)), reply(1, 2))
    texts = "\n".join(f"line {number}" for number in range(66))
    assert run("embed", "--lines", home=vectors.home, stdin=texts).returncode == Exit.OK
    parts = [seen.body["part_of"] for seen in vectors.seen if seen.path == EMBED]
    assert len(parts) == 2
    assert parts[0] == parts[1]
    assert parts[0]["total"] == 66


@pytest.mark.parametrize("name", ["out.jsonl", "out.npy"])
def test_a_second_run_computes_only_what_is_new_or_has_changed(
    vectors: FakeDaemon, run: Run, tmp_path: Path, name: str
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / name
    source.write_text("one\ntwo\n")
    vectors.on("POST", EMBED, reply(1, 2), reply(3, 4))
    command = ["embed", str(source), "--lines", "-o", str(out)]
    assert run(*command, home=vectors.home).returncode == Exit.OK
    source.write_text("one\ntwo changed\nthree\n")
    done = run(*command, "--json", home=vectors.home)
    assert asked(vectors) == [["one", "two"], ["two changed", "three"]]
    assert json.loads(done.stdout) == {"texts": 3, "computed": 2, "tokens": 9, "file": str(out)}
    assert run(*command, home=vectors.home).returncode == Exit.OK
    assert len(asked(vectors)) == 2
    rows = lines(out if name == "out.jsonl" else tmp_path / "out.npy.texts.jsonl")
    assert [row["id"].rpartition(":")[2] for row in rows] == ["1", "2", "2", "3"]
    if name == "out.npy":
        matrix = np.load(out)
        assert matrix.dtype == np.float32
        assert matrix.tobytes() == b"".join(map(vector, (1, 2, 3, 4)))


def test_a_run_that_was_cut_off_goes_on_behind_the_last_whole_line(
    vectors: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\n")
    whole = json.dumps({"id": f"{source}:1", "sha256": sha256("one"), "model": "minilm", "embedding": [1.0]})
    out.write_text(f'{whole}\n{{"id": "torn')
    vectors.on("POST", EMBED, reply(2))
    assert run("embed", str(source), "--lines", "-o", str(out), home=vectors.home).returncode == Exit.OK
    assert asked(vectors) == [["two"]]
    assert [line["id"] for line in lines(out)] == [f"{source}:1", f"{source}:2"]


def test_an_answer_that_breaks_off_writes_nothing_of_its_request(
    vectors: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    vectors.on("POST", EMBED, reply(1, 2, until=1))
    done = run("embed", "--lines", "-o", str(out), home=vectors.home, stdin="one\ntwo\n")
    assert done.returncode == Exit.FAILED
    assert not out.exists()


def test_a_run_without_a_vector_leaves_no_new_file(vectors: FakeDaemon, run: Run, tmp_path: Path) -> None:
    error = {"error": {"message": "There is no model.", "code": "model_not_found", "hint": ""}}
    vectors.on("POST", EMBED, Reply(error, status=404))
    (tmp_path / "mine.jsonl").write_text("")
    for name in ("out.npy", "out.jsonl", "mine.jsonl"):
        done = run("embed", "-o", str(tmp_path / name), home=vectors.home, stdin="one")
        assert done.returncode != Exit.OK
    assert [file.name for file in tmp_path.glob("*.*")] == ["mine.jsonl"]


def test_without_any_text_the_command_says_so(vectors: FakeDaemon, run: Run, tmp_path: Path) -> None:
    done = run("embed", "-o", str(tmp_path / "out.npy"), home=vectors.home, stdin=" \n")
    assert done.returncode == Exit.USAGE
    assert "The texts are empty" in done.stderr
    assert not list(tmp_path.glob("out*"))


def test_vectors_of_two_models_do_not_come_into_one_file(
    vectors: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    vectors.on("POST", EMBED, reply(1), reply(2, name="other"))
    assert run("embed", "--lines", "-o", str(out), home=vectors.home, stdin="one\n").returncode == Exit.OK
    done = run("embed", "--lines", "-o", str(out), home=vectors.home, stdin="one\ntwo\n")
    assert done.returncode == Exit.ERROR
    assert "vectors of minilm, and these are of other" in done.stderr
    assert len(lines(out)) == 1


def test_an_error_of_the_daemon_is_said_with_its_code(vectors: FakeDaemon, run: Run) -> None:
    error = {"error": {"message": "700 tokens.", "code": "context_length_exceeded", "hint": ""}}
    vectors.on("POST", EMBED, Reply(error, status=400))
    done = run("embed", "--lines", home=vectors.home, stdin="one\nthe longest of them\ntwo\n")
    assert done.returncode == Exit.REFUSED
    assert "The longest one is stdin:2" in done.stderr
    assert "--truncate" in done.stderr
    vectors.on("POST", EMBED, Reply(stream=[data({"error": {"message": "It died.", "code": "engine_died"}})]))
    assert run("embed", home=vectors.home, stdin="one").returncode == Exit.FAILED


def test_without_a_model_for_vectors_the_command_says_how_to_get_one(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("GET", "/v1/models", Reply({"data": [model("chatty", "chat")]}))
    done = run("embed", home=daemon.home, stdin="one")
    assert done.returncode == Exit.ERROR
    assert "No model of the fleet makes vectors" in done.stderr
    assert "fleetctl models pull" in done.stderr


def test_another_form_and_another_programs_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="neither"):
        open_vectors(tmp_path / "out.csv")
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(ClientError, match="no matrix"):
        open_vectors(tmp_path / "a.npy")
    (tmp_path / "a.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(ClientError, match="no file"):
        open_vectors(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("mine\n")
    with pytest.raises(ClientError, match="no line"):
        open_vectors(tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.npy.texts.jsonl"])
@pytest.mark.parametrize("said", ['{"text": "mine"}', '{"text": "mine"}\n{"text": "more"}', "mine"])
def test_another_programs_file_without_a_last_line_break_is_left_as_it_is(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / name).write_text(said)
    with pytest.raises(ClientError, match="Name another file"):
        open_vectors(tmp_path / name.removesuffix(".texts.jsonl"))
    assert (tmp_path / name).read_text() == said


@given(whole=st.integers(0, 4), torn_rows=st.integers(0, 20), torn_index=st.integers(0, 30))
def test_a_matrix_that_was_torn_anywhere_has_just_its_whole_rows(
    whole: int, torn_rows: int, torn_index: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.npy"
        texts = [CorpusText(str(n), f"text {n}") for n in range(6)]
        out = NpyMatrix(path)
        for n in range(whole + 1):
            out.add([texts[n]], [vector(n)], "m")
        out.close()
        index = path.with_name("m.npy.texts.jsonl")
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - torn_rows % 13])
        index.write_bytes(index.read_bytes()[: len(index.read_bytes()) - torn_index % 100])
        again = NpyMatrix(path)
        kept = len(again.done)
        assert kept >= whole
        again.add([texts[5]], [vector(5)], "m")
        again.close()
        matrix = np.load(path)
        assert matrix.tobytes() == b"".join(map(vector, [*range(kept), 5]))
        assert len(index.read_text().splitlines()) == kept + 1


def test_numbers_are_those_of_the_bytes() -> None:
    assert numbers(struct.pack("<2f", 0.5, -2.0)).tolist() == [0.5, -2.0]


def test_a_line_without_end_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"x" * (1 << 21))
    with pytest.raises(ClientError, match="is longer than"):
        read_corpus([str(path)], lines=True)


# ---- rerank ------------------------------------------------------------------------------------------------


def test_the_best_documents_are_shown_first(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("GET", "/v1/models", Reply({"data": [model("judge", "rerank")]}))
    results = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.25}]
    daemon.on("POST", RERANK, Reply({"results": results}))
    done = run("rerank", "Which?", "--lines", "-n", "2", home=daemon.home, stdin="one\ntwo\n")
    assert done.returncode == Exit.OK
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["0.900", "stdin:2", "two"],
        ["0.250", "stdin:1", "one"],
    ]
    assert daemon.seen[-1].body == {
        "model": "judge",
        "query": "Which?",
        "documents": ["one", "two"],
        "top_n": 2,
    }
    done = run("rerank", "Which?", "--lines", "--json", home=daemon.home, stdin="one\ntwo\n")
    assert json.loads(done.stdout.splitlines()[0]) == {"id": "stdin:2", "score": 0.9, "text": "two"}


def test_scores_that_make_no_sense_are_an_error(daemon: FakeDaemon, run: Run) -> None:
    daemon.on("POST", RERANK, Reply({"results": [{"index": 7, "relevance_score": 0.9}]}))
    done = run("rerank", "Which?", "-m", "judge", home=daemon.home, stdin="one")
    assert done.returncode == Exit.FAILED
    assert run("rerank", "Which?", home=daemon.home, stdin=" ").returncode == Exit.USAGE
