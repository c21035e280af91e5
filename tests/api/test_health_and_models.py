"""/health tells the truth, /metrics passes through, /v1/models lists what would answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_fakes import MODEL, FakeFleet, Site, engine, serve, services, status
from fakes import FACTS, FakeFolder, FakeModels, FakePool

from fleetd import limits
from fleetd.api.health import judge
from fleetd.control import fleet_view
from fleetd.control.model_facts import ModelShape
from fleetd.engine import protocol as p
from fleetd.models.folder import ModelFolder
from fleetd.models.model_names import ModelNames

LATE_S = limits.ENGINE_STALL_REPORT_S


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "ok"),
        ({"engines": [engine()]}, "ok"),
        ({"engines": [engine(progress_age_s=1e6)]}, "ok"),  # idle engines need not move
        ({"engines": [engine(decoding=1, progress_age_s=LATE_S)]}, "ok"),
        ({"engines": [engine(decoding=1, progress_age_s=LATE_S + 1)]}, "stalled"),
        ({"engines": [engine(prefilling=1, progress_age_s=LATE_S + 1)]}, "stalled"),
        ({"engines": [engine(), engine(waiting=1, progress_age_s=LATE_S + 1)]}, "stalled"),
        ({"engines": [engine(state="loading", waiting=1, progress_age_s=1e6)]}, "ok"),
        ({"engines": [engine(state="failed", error="x")]}, "ok"),
        ({"draining": True}, "draining"),
        ({"ready": False}, "starting"),
    ],
)
async def test_health_follows_the_engines(given: dict[str, Any], expected: str) -> None:
    assert judge(status(**given)).status == expected
    async with serve(services(status=lambda: status(**given))) as site, site.client() as session:
        for path in ("/health", "/health/ready", "/ready"):
            async with session.get(path) as response:
                body = await response.json()
                assert body["status"] == expected
                assert response.status == (200 if expected == "ok" else 503)
                assert ("Retry-After" in response.headers) is (expected != "ok")
                assert body["reason"] or expected == "ok"
        for path in ("/health/live", "/live"):
            async with session.get(path) as response:
                assert response.status == 200


def test_a_stall_names_the_model_and_the_age() -> None:
    health = judge(status(engines=[engine(decoding=2, progress_age_s=42.4)]))
    assert MODEL in health.reason
    assert "42 s" in health.reason


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("", "text/plain"), ("application/openmetrics-text; version=1.0.0", "application/openmetrics")],
)
async def test_metrics_follow_accept(accept: str, kind: str) -> None:
    async with serve(services()) as site, site.client() as session:
        async with session.get("/metrics", headers={"Accept": accept}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith(kind)


async def test_models_in_openais_shape() -> None:
    given = services(status=lambda: status(engines=[engine()]))
    async with serve(given) as site, site.client() as session:
        async with session.get("/v1/models") as response:
            listing = await response.json()
        first, second = listing["data"]
        assert listing["object"] == "list"
        assert first == {
            "id": MODEL,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "fleetd",
            "context_length": 8192,
            "max_model_len": 8192,
            "fleet": {
                "source": "embedded",
                "architecture": "llama",
                "context_tokens": 8192,
                "weights_bytes": 1000,
                "loaded": True,
                "installed": True,
                "nodes": [{"node": "this", "state": "loaded"}],
                "tools": "grammar",
                "thinking": False,
                "images": False,
                "purpose": "chat",
                "vector_width": 0,
            },
        }
        assert (second["fleet"]["tools"], second["fleet"]["thinking"]) == ("json_tools", True)
        assert (second["owned_by"], second["fleet"]["loaded"]) == ("mlx-community", False)
        for name in (first["id"], second["id"]):  # hub ids have a slash
            async with session.get(f"/v1/models/{name}") as response:
                assert (await response.json())["id"] == name
        async with session.get("/v1/models/nobody/knows") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


async def test_a_model_for_vectors_has_the_length_of_its_longest_text(tmp_path: Path) -> None:
    """Which is less than the positions that its config has; splitters of documents go by it."""
    config = {"model_type": "bert", "max_position_embeddings": 512, "hidden_size": 8}
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    folder = ModelFolder("texts", tmp_path, "embedded", None, config, 1000, 0.0, "embedding", 8)
    models = FakeModels(names=["texts"], found=[folder])  # type: ignore[list-item]
    async with serve(services(models=models, names=ModelNames("texts"))) as site, site.client() as session:
        async with session.get("/v1/models") as response:
            (listed,) = (await response.json())["data"]
        async with session.post("/api/show", json={"model": "texts"}) as response:
            shown = (await response.json())["model_info"]
    assert listed["context_length"] == listed["max_model_len"] == listed["fleet"]["context_tokens"] == 256
    assert shown["bert.context_length"] == 256


async def test_clients_of_anthropics_are_offered_chats_alone(tmp_path: Path) -> None:
    config = {"model_type": "bert", "hidden_size": 8}
    folder = ModelFolder("texts", tmp_path, "embedded", None, config, 1000, 0.0, "embedding", 8)
    models = FakeModels(names=["texts", MODEL], found=[folder, FakeFolder(MODEL)])  # type: ignore[list-item]
    async with serve(services(models=models)) as site, site.client() as session:
        async with session.get("/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
            page = await response.json()
        async with session.get("/v1/models") as response:
            every = await response.json()
    assert [each["id"] for each in page["data"]] == [MODEL, f"claude-fleet-{MODEL}"]
    assert {each["id"] for each in every["data"]} == {MODEL, "texts"}


async def test_a_model_that_only_a_peer_knows_has_the_length_that_the_peer_tells() -> None:
    there = fleet_view.PeerModel("tuned", "installed", ["chat"], shape=ModelShape(context_tokens=4096))
    peer = fleet_view.PeerView("n1", "n1", "studio", "usable", sees_prompts=True, models=[there])
    fleet = FakeFleet(fleet=fleet_view.FleetView(True, "me", "me", "here", peers=[peer]))
    async with serve(services(fleet=fleet)) as site, site.client() as session:
        async with session.get("/v1/models/tuned") as response:
            assert (await response.json())["context_length"] == 4096


class LoadedPool(FakePool):
    def facts(self, name: str) -> p.Ready | None:
        said = {"tool_calls": True, "tool_format": "glm47", "reasoning": True}
        return msgspec.structs.replace(FACTS, **said) if name == MODEL else None


async def test_what_a_loaded_model_says_of_itself_is_believed_first() -> None:
    async with serve(services(pool=LoadedPool())) as site, site.client() as session:
        async with session.get(f"/v1/models/{MODEL}") as response:
            one = (await response.json())["fleet"]
        async with session.get("/v1/models") as response:
            first = (await response.json())["data"][0]["fleet"]
    assert [(each["tools"], each["thinking"]) for each in (one, first)] == [("glm47", True)] * 2


async def test_the_default_model_is_listed_before_it_is_fetched() -> None:
    async with serve(services(models=FakeModels(names=[]))) as site, site.client() as session:
        async with session.get("/v1/models") as response:
            (only,) = (await response.json())["data"]
        assert (only["id"], only["fleet"]["installed"]) == (MODEL, False)
        async with session.get(f"/v1/models/{MODEL}") as response:
            assert response.status == 200


async def test_a_model_of_the_fleet_is_listed_once_with_where_it_is() -> None:
    """Also one that this machine does not have; not what is on a machine that could not answer."""
    model = fleet_view.PeerModel("qwen3-8b", "loaded", ["chat"])
    # An earlier version may tell of what nobody can ask for.
    both = [fleet_view.PeerModel("my model", "loaded", ["chat"]), model]
    both.append(fleet_view.PeerModel(MODEL, "installed", ["chat"]))
    peers = [
        fleet_view.PeerView("n1", "n1", "studio", "usable", sees_prompts=True, models=both),
        fleet_view.PeerView("n2", "n2", "mini", "usable", sees_prompts=True, models=[model]),
        fleet_view.PeerView("n3", "n3", "air", "usable", sees_prompts=False, models=[model]),
        fleet_view.PeerView("n4", "n4", "pro", "unreachable", sees_prompts=True, models=[model]),
    ]
    fleet = FakeFleet(fleet=fleet_view.FleetView(True, "me", "me", "here", peers=peers))
    async with serve(services(fleet=fleet)) as site, site.client() as session:
        async with session.get("/v1/models") as response:
            found = {item["id"]: item["fleet"] for item in (await response.json())["data"]}
        async with session.get("/v1/models/qwen3-8b") as response:
            one = await response.json()
    assert set(found) == {MODEL, "mlx-community/Qwen3-0.6B-4bit", "qwen3-8b"}
    assert found["qwen3-8b"]["nodes"] == [
        {"node": "studio", "state": "loaded"},
        {"node": "mini", "state": "loaded"},
    ]
    assert not found["qwen3-8b"]["installed"]
    assert (found["qwen3-8b"]["tools"], found["qwen3-8b"]["thinking"]) == ("json_tools", True)
    assert one["context_length"] == one["max_model_len"] == found["qwen3-8b"]["context_tokens"] == 40_960
    assert [place["node"] for place in found[MODEL]["nodes"]] == ["this", "studio"]
    assert one["fleet"] == found["qwen3-8b"]


@pytest.mark.parametrize(
    "name", ["default", MODEL, f"{MODEL}:latest", "claude-opus-4-5", f"claude-fleet-{MODEL}"]
)
async def test_each_name_that_answers_is_shown_under_that_name(site: Site, name: str) -> None:
    async with site.client() as session:
        async with session.get(f"/v1/models/{name}") as response:
            assert response.status == 200
            shown = await response.json()
            assert (shown["id"], shown["fleet"]["installed"]) == (name, True)
        async with session.head(f"/v1/models/{name}") as response:
            assert response.status == 200
        async with session.get(f"/v1/models/{name}", headers={"anthropic-version": "2023-06-01"}) as response:
            info = await response.json()
            assert (info["id"], info["display_name"]) == (name, MODEL)
        async with session.post("/api/show", json={"model": name}) as response:
            assert response.status == 200
            assert (await response.json())["details"]["parameter_size"] == "135M"
