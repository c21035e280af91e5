"""/fleet/v1/* on the Unix socket, as fleetctl uses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from api_fakes import (
    MODEL,
    TOKEN,
    FakeLedger,
    FakeRunner,
    engine,
    frames,
    installed_models,
    serve_unix,
    services,
    status,
)
from fakes import FakeFolder, FakeModels, FakePool, FakePullStep
from msgspec.structs import replace

from fleetd import errors, limits
from fleetd.api.app import build_app
from fleetd.api.http.deadlines import BoundedRunner
from fleetd.control.daemon_status import DaemonStatus, HttpAddress
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.setting_view import SettingsView, SettingView
from fleetd.models import catalog, heads
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_search import HubModel, HubPage
from fleetd.models.memory_need import WORKING_BYTES


@dataclass
class ControlledDaemon:
    session: aiohttp.ClientSession
    models: FakeModels
    pool: FakePool
    verified: list[Any]
    status: DaemonStatus
    found: HubPage = field(default_factory=lambda: HubPage([]))
    searched: list[str] = field(default_factory=list)
    settings: SettingsView = field(default_factory=SettingsView)

    async def search(self, words: str) -> HubPage:
        self.searched.append(words)
        return self.found

    async def get(self, path: str, expected: int = 200) -> Any:
        async with self.session.get(path) as response:
            assert response.status == expected
            return await response.json()

    async def post(self, path: str, model: Any = MODEL, expected: int = 200) -> Any:
        async with self.session.post(path, json={"model": model}) as response:
            assert response.status == expected
            return await response.json()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[ControlledDaemon]:
    models, pool, verified = installed_models(), FakePool(), []

    def verify(path: Path, *, full: bool) -> None:
        verified.append((path, full))

    def current() -> DaemonStatus:
        return daemon.status

    async def search(words: str) -> HubPage:
        return await daemon.search(words)

    given = services(
        FakeRunner(),
        models=models,
        pool=pool,
        verify=verify,
        status=current,
        search=search,
        settings=lambda: daemon.settings,
    )
    async with serve_unix(given, tmp_path / "s") as site, site.client(headers={}) as session:
        daemon = ControlledDaemon(
            session, models, pool, verified, status(engines=[engine(memory_bytes=1 << 30)])
        )
        yield daemon


async def test_status_is_passed_on_as_it_is(daemon: ControlledDaemon) -> None:
    assert await daemon.get("/fleet/v1/status") == msgspec.to_builtins(daemon.status)


async def test_models_lists_what_is_here_and_what_could_be(daemon: ControlledDaemon) -> None:
    listing = await daemon.get("/fleet/v1/models")
    first = listing["installed"][0]
    assert set(first) == {
        "name", "source", "architecture", "weights_bytes", "context_tokens", "roles", "path", "loaded",
        "pinned", "digest", "tools", "thinking", "images", "ignored", "fit", "drafter", "drafter_off",
    }  # fmt: skip
    assert (first["drafter"], first["drafter_off"]) == ("", "")
    assert (first["name"], first["loaded"]) == (MODEL, True)
    assert (first["ignored"], listing["unlisted"]) == ([], [])
    assert len(listing["catalog"]) == len(catalog.entries())
    entries = {entry["name"]: entry for entry in listing["catalog"]}
    assert entries[MODEL]["installed"]
    # Four of sixteen GiB are free, and the idle model would give one more back.
    fits = {entry["name"]: entry["fit"] for entry in listing["catalog"]}
    assert fits[MODEL] == fits["qwen3-4b"] == {"where": "here", "machines": [], "short_bytes": 0}
    assert fits["qwen3-8b"] == {"where": "freed", "machines": [], "short_bytes": 2 << 30}
    assert fits["qwen3-30b-a3b"] == {"where": "none", "machines": [], "short_bytes": 5 << 30}
    assert listing["memory_reason"] == ""
    assert [(name, each["recommended"]) for name, each in entries.items() if each["recommended"]] == [
        ("gpt-oss-20b", ["chat", "coding"]),
    ]
    assert entries["qwen3-4b"]["note"] == "the best answers that fit 8 GB; does not think aloud"
    assert entries["qwen3-4b"]["download_bytes"] == 2_300_000_000
    assert listing["memory"]["usable_bytes"] == 4 << 30
    assert listing["evictable_bytes"] == 1 << 30
    assert set(entries[MODEL]) == {
        "name", "aliases", "hub_id", "roles", "note", "download_bytes", "memory_bytes", "context_tokens",
        "tier", "installed", "fit", "recommended", "tools", "thinking",
        "draft", "head",
    }  # fmt: skip
    assert (entries["gpt-oss-20b"]["tools"], entries["gpt-oss-20b"]["thinking"]) == ("harmony", True)
    second = listing["installed"][1]
    assert [(model["tools"], model["thinking"]) for model in (first, second)] == [
        ("grammar", False),
        ("json_tools", True),
    ]


async def test_a_model_that_is_too_large_here_fits_on_a_paired_machine_by_its_memory(
    daemon: ControlledDaemon,
) -> None:
    peers = [
        PeerView("a", "a", "studio", "usable", accelerator="metal", memory_bytes=64 << 30),
        PeerView("b", "b", "box", "usable", accelerator="cpu", memory_bytes=96 << 30),
        PeerView("c", "c", "unknown", "unreachable"),
    ]
    fleet = FleetView(True, "me", "me", "mini", peers=peers)
    daemon.status = replace(daemon.status, fleet=fleet)
    entries = {each["name"]: each["fit"] for each in (await daemon.get("/fleet/v1/models"))["catalog"]}
    # Of 64 GiB a Mac's GPU may hold three quarters, and models take 85 % of that.
    elsewhere = {"where": "elsewhere", "short_bytes": 6 << 30}
    assert entries["qwen3-32b"] == {**elsewhere, "machines": ["studio", "box"]}
    assert entries["llama-3.3-70b"] == {**elsewhere, "machines": ["box"], "short_bytes": 30 << 30}
    assert entries["gpt-oss-120b"]["where"] == "none"
    assert entries["qwen3-8b"]["machines"] == ["studio", "box"]


async def test_a_listing_tells_what_drafts_for_a_model_and_why_it_does_not(
    daemon: ControlledDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drafter() -> tuple[str, str]:
        first = (await daemon.get("/fleet/v1/models"))["installed"][0]
        return first["drafter"], first["drafter_off"]

    daemon.settings = SettingsView([SettingView("speculation.draft_model", "small")])
    assert await drafter() == ("small", "")
    for file, said in (("model.safetensors", "head"), ("mtp.safetensors", "sidecar")):
        monkeypatch.setattr(heads, "head_file", lambda path, config, file=file: file)
        assert await drafter() == (said, "")
    engines = [replace(each, draft_head="off: it is another model's") for each in daemon.status.engines]
    daemon.status = replace(daemon.status, engines=engines)
    assert await drafter() == ("sidecar", "it is another model's")
    # Ranks read no head.
    daemon.status = replace(
        daemon.status, engines=[replace(each, draft_head="", ranks=2) for each in engines]
    )
    assert await drafter() == ("sidecar", "its layers are divided between machines")


@pytest.mark.parametrize("named", ["", "small", "org/Tiny-DFlash"])
@pytest.mark.parametrize("head", ["", "mtp.safetensors"])
async def test_a_listing_says_that_nothing_drafts_if_the_settings_say_so(
    named: str, head: str, daemon: ControlledDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.models.found = [FakeFolder(MODEL), FakeFolder("org/Tiny-DFlash", config={"dflash_config": {}})]
    monkeypatch.setattr(heads, "head_file", lambda path, config: head)
    values = {"speculation.draft_model": named, "speculation.mode": "off"}
    daemon.settings = SettingsView([SettingView(key, value) for key, value in values.items()])
    first = (await daemon.get("/fleet/v1/models"))["installed"][0]
    drafter = "sidecar" if head and named != "org/Tiny-DFlash" else named
    assert first["drafter"] == drafter
    assert first["drafter_off"] == ("speculation.mode is off" if drafter else "")


async def test_a_drafter_that_reads_hidden_states_goes_before_a_models_own_head(
    daemon: ControlledDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is listed as what it is."""
    monkeypatch.setattr(heads, "head_file", lambda path, config: "mtp.safetensors")
    name = "org/Tiny-DFlash"
    daemon.models.found = [FakeFolder(MODEL), FakeFolder(name, config={"dflash_config": {}})]
    daemon.settings = SettingsView([SettingView("speculation.draft_model", name)])

    async def drafter(said: str) -> tuple[str, str]:
        engines = [replace(each, draft_head=said) for each in daemon.status.engines]
        daemon.status = replace(daemon.status, engines=engines)
        first, *_, last = (await daemon.get("/fleet/v1/models"))["installed"]
        assert (last["roles"], last["drafter"]) == (["draft"], "")
        return first["drafter"], first["drafter_off"]

    assert await drafter("") == (name, "")
    assert await drafter("dflash: 4.0 ms for 7 tokens") == (name, "")
    assert await drafter("off: it was made for another model") == (name, "it was made for another model")
    own = "mtp: 0.5 ms a token. off: it was made for another model"
    assert await drafter(own) == (name, "it was made for another model; the model's own head does")


async def test_a_model_for_vectors_is_listed_with_its_longest_text(
    daemon: ControlledDaemon, tmp_path: Path
) -> None:
    config = {"model_type": "bert", "max_position_embeddings": 512, "hidden_size": 8}
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    folder = ModelFolder("texts", tmp_path, "embedded", None, config, 1000, 0.0, "embedding", 8)
    daemon.models.found = [folder]  # type: ignore[list-item]
    (only,) = (await daemon.get("/fleet/v1/models"))["installed"]
    assert only["context_tokens"] == 256


async def test_the_hub_is_searched_by_name_and_what_fits_comes_first(daemon: ControlledDaemon) -> None:
    gib = 1 << 30
    daemon.found = HubPage(
        [
            HubModel("org/Large-4bit", "mlx", "llama", 40 * gib, 4, 900),
            HubModel("org/Small-GGUF", "gguf", "llama", 2 * gib, 4, 800, gated=True),
            HubModel("mlx-community/Qwen3-8B-4bit", "mlx", "qwen3", 2 * gib, 4, 3),
            HubModel("org/Odd", "safetensors", "llama"),
        ],
        others=7,
    )
    found = await daemon.get("/fleet/v1/models/search?words=small%20%20llama")
    assert daemon.searched == ["small llama"]
    assert (found["words"], found["others"]) == ("small llama", 7)
    assert [(each["hub_id"], each["fit"]["where"]) for each in found["models"]] == [
        ("mlx-community/Qwen3-8B-4bit", "here"),
        ("org/Small-GGUF", "here"),
        ("org/Odd", "here"),
        ("org/Large-4bit", "none"),
    ]
    assert found["models"][1]["gated"]
    assert found["models"][1]["memory_bytes"] == 2 * gib + WORKING_BYTES
    assert (found["models"][2]["download_bytes"], found["models"][2]["memory_bytes"]) == (0, 0)


@pytest.mark.parametrize("words", ["", "x", "x" * 101])
async def test_a_search_needs_words(daemon: ControlledDaemon, words: str) -> None:
    error = await daemon.get(f"/fleet/v1/models/search?words={words}", expected=400)
    assert error["error"]["param"] == "words"
    assert daemon.searched == []


async def test_machines_that_can_be_added_are_listed_and_odd_questions_refused(
    daemon: ControlledDaemon,
) -> None:
    names = (await daemon.get("/fleet/v1/plan/machines"))["machines"]
    assert {"Mac mini M4, 16 GB", "DGX Spark, 128 GB"} <= {*names}
    for body in ({"link": "pigeon"}, {"machine": 4}, {"other": ""}):
        async with daemon.session.post("/fleet/v1/plan/added", json=body) as response:
            assert response.status == 400, body


async def test_load_and_unload(daemon: ControlledDaemon) -> None:
    assert await daemon.post("/fleet/v1/models/load") == {"ok": True}
    assert daemon.pool.loaded == [MODEL]
    assert await daemon.post("/fleet/v1/models/unload") == {"ok": True}
    assert daemon.pool.loaded == []
    assert (await daemon.post("/fleet/v1/models/unload", expected=404))["error"]["code"] == "model_not_found"


async def test_a_pinned_model_is_loaded_and_listed_as_such_until_it_is_unpinned_or_removed(
    daemon: ControlledDaemon,
) -> None:
    async def pinned() -> list[str]:
        installed = (await daemon.get("/fleet/v1/models"))["installed"]
        return [model["name"] for model in installed if model["pinned"]]

    assert await daemon.post("/fleet/v1/models/pin") == {"ok": True}
    assert (daemon.pool.loaded, await pinned()) == ([MODEL], [MODEL])
    assert await daemon.post("/fleet/v1/models/unpin") == {"ok": True}
    # It stays loaded until it was idle for long, as any other.
    assert (daemon.pool.loaded, await pinned()) == ([MODEL], [])
    await daemon.post("/fleet/v1/models/pin")
    await daemon.post("/fleet/v1/models/remove")
    assert await pinned() == []
    refused = await daemon.post("/fleet/v1/models/unpin", expected=404)
    assert refused["error"]["code"] == "model_not_found"


async def test_a_model_whose_folder_is_gone_is_unloaded_by_its_name(daemon: ControlledDaemon) -> None:
    daemon.pool.loaded.append("gone")
    assert await daemon.post("/fleet/v1/models/unload", "gone") == {"ok": True}
    assert daemon.pool.loaded == []
    refused = await daemon.post("/fleet/v1/models/unload", "gone", expected=404)
    assert refused["error"]["code"] == "model_not_found"


async def test_verify_reads_everything_and_answers_with_the_digest(daemon: ControlledDaemon) -> None:
    assert await daemon.post("/fleet/v1/models/verify") == {"ok": True, "digest": f"blake3:{MODEL}"}
    assert daemon.verified == [(Path("/models/it"), True)]


async def test_remove_unloads_first(daemon: ControlledDaemon) -> None:
    daemon.pool.loaded.append(MODEL)
    assert await daemon.post("/fleet/v1/models/remove") == {"ok": True}
    assert (daemon.pool.loaded, daemon.models.removed) == ([], [MODEL])


async def test_a_damaged_model_or_one_that_is_gone_can_be_removed_by_its_name(
    daemon: ControlledDaemon,
) -> None:
    assert await daemon.post("/fleet/v1/models/remove", "gone") == {"ok": True}
    assert daemon.models.removed == ["gone"]


async def add(daemon: ControlledDaemon, **body: str) -> list[dict[str, Any]]:
    async with daemon.session.post("/fleet/v1/models/add", json=body) as response:
        assert response.status == 200
        return [json.loads(frame) for frame in frames(await response.text())]


async def test_a_folder_is_added_at_once_and_a_file_is_imported_first(daemon: ControlledDaemon) -> None:
    daemon.models.pull_steps = [FakePullStep("sha256-1", 1, 2)]
    assert await add(daemon, path="/models/mine", name="mine") == [{"done": True, "name": "mine"}]
    steps = await add(daemon, path="qwen3:4b")
    assert [step.get("file") for step in steps] == ["sha256-1", None]
    assert steps[-1] == {"done": True, "name": "usual"}
    assert daemon.models.names[-3:] == ["mine", "/blobs/sha256-1", "usual"]
    found = {"name": "qwen3:4b", "program": "Ollama", "path": "/blobs/sha256-1", "size_bytes": 5}
    assert (await daemon.get("/fleet/v1/models"))["importable"] == [found]


@pytest.mark.parametrize("verb", ["load", "unload", "pin", "unpin", "verify"])
async def test_unknown_models_and_odd_bodies_are_refused(daemon: ControlledDaemon, verb: str) -> None:
    path = f"/fleet/v1/models/{verb}"
    assert (await daemon.post(path, "nobody", 404))["error"]["code"] == "model_not_found"
    for odd in (None, "", 1, "x" * 5000):
        for route in (path, "/fleet/v1/models/remove"):
            assert (await daemon.post(route, odd, 400))["error"]["param"] == "model"


async def pull(daemon: ControlledDaemon, name: str) -> list[dict[str, Any]]:
    async with daemon.session.post("/fleet/v1/models/pull", json={"model": name}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return [json.loads(frame) for frame in frames(await response.text())]


async def test_pull_streams_progress_and_says_when_it_is_done(daemon: ControlledDaemon) -> None:
    daemon.models.pull_steps = [FakePullStep("a.safetensors", 1, 2), FakePullStep("a.safetensors", 2, 2)]
    assert await pull(daemon, "new") == [
        {"file": "a.safetensors", "done_bytes": 1, "total_bytes": 2, "stage": "downloading"},
        {"file": "a.safetensors", "done_bytes": 2, "total_bytes": 2, "stage": "downloading"},
        {"done": True, "name": "new"},
    ]


async def test_pull_ends_with_what_went_wrong(daemon: ControlledDaemon) -> None:
    daemon.models.pull_steps = [FakePullStep("a", 1, 2), errors.DiskFull("No space.", hint="Free 1 GB.")]
    *_, last = await pull(daemon, "new")
    assert (last["error"]["code"], last["error"]["hint"]) == ("disk_full", "Free 1 GB.")
    assert daemon.models.pull_ended.is_set()


async def test_pull_talks_while_the_source_is_silent(
    daemon: ControlledDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.05)
    go = asyncio.Event()
    daemon.models.pull_steps = [go]
    async with daemon.session.post("/fleet/v1/models/pull", json={"model": "new"}) as response:
        seen = b""
        async for piece in response.content.iter_any():
            seen += piece
            if seen.count(b": keepalive") >= 3:
                go.set()
    assert b'"done":true' in seen


async def test_leaving_a_pull_stops_it(daemon: ControlledDaemon) -> None:
    daemon.models.pull_steps = [FakePullStep("a", 1, 2), asyncio.Event()]
    async with daemon.session.post("/fleet/v1/models/pull", json={"model": "new"}) as response:
        await response.content.readuntil(b"downloading")
        response.close()
    async with asyncio.timeout(60):
        await daemon.models.pull_ended.wait()
    assert "new" not in daemon.models.names


@pytest.mark.parametrize(
    ("days", "expected"), [("7", 200), ("", 400), ("0", 400), ("-1", 400), ("99999", 400), ("²", 400)]
)
async def test_usage(daemon: ControlledDaemon, days: str, expected: int) -> None:
    body = await daemon.get(f"/fleet/v1/usage?days={days}", expected)
    if expected == 200:
        assert body == msgspec.to_builtins(FakeLedger().usage(7))
    else:
        assert body["error"]["param"] == "days"


@pytest.mark.parametrize(
    ("http", "url"),
    [
        (HttpAddress("127.0.0.1", 8114), "http://127.0.0.1:8114/v1"),
        (HttpAddress("0.0.0.0", 1), "http://127.0.0.1:1/v1"),  # noqa: S104
        (HttpAddress("::1", 2), "http://[::1]:2/v1"),
        (None, None),
    ],
)
async def test_env(daemon: ControlledDaemon, http: HttpAddress | None, url: str | None) -> None:
    daemon.status = status(http=http, ollama=http)
    settings = {"base_url": url, "api_key": TOKEN, "large": MODEL, "small": MODEL}
    settings["ollama_url"] = "" if url is None else url.removesuffix("/v1")
    assert await daemon.get("/fleet/v1/env") == settings


async def test_one_application_serves_both_sites_and_trusts_only_the_socket(tmp_path: Path) -> None:
    """As the daemon runs it: two runners, one application."""
    runner = FakeRunner()
    app = build_app(services(runner))
    local, remote = BoundedRunner(app, trusted=True), BoundedRunner(app, trusted=False)
    await local.setup()
    await web.UnixSite(local, str(tmp_path / "s")).start()
    await remote.setup()
    await web.TCPSite(remote, "127.0.0.1", 0).start()
    port = remote.addresses[0][1]
    unix = aiohttp.UnixConnector(str(tmp_path / "s"))
    async with aiohttp.ClientSession("http://fleetd", connector=unix) as session:
        async with session.get("/fleet/v1/status") as response:
            assert response.status == 200
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/fleet/v1/status") as response:
            assert response.status == 401
        async with session.get("/v1/models", headers={"x-api-key": TOKEN}) as response:
            assert response.status == 200
    await remote.cleanup()
    await local.cleanup()
