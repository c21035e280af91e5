"""Searches of the hub: what is asked, what of the answer can be read here, and what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_files import Hub, serving

from fleetd import limits
from fleetd.errors import DownloadFailed
from fleetd.models.hub_search import HubModel, search
from fleetd.models.pull import search as pull_search

# The work is another process's.
pytestmark = pytest.mark.one_loop


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        # To import the hub's library takes seconds, and many on a busy machine.
        monkeypatch.setattr(limits, "HUB_SEARCH_S", 60.0)
        yield server


def listed(hub_id: str, **more: Any) -> dict[str, Any]:
    return {"id": hub_id, "modelId": hub_id, "tags": ["safetensors"], "downloads": 5, "gated": False, **more}


MLX = listed(
    "mlx-community/Qwen3-4B-4bit",
    tags=["mlx", "safetensors"],
    config={"model_type": "qwen3", "quantization_config": {"group_size": 64, "bits": 4}},
    safetensors={"parameters": {"BF16": 126_000_000, "U32": 502_000_000}, "total": 628_000_000},
)
PLAIN = listed(
    "org/Mistral-7B",
    gated="auto",
    config={"model_type": "mistral"},
    safetensors={"parameters": {"BF16": 7_000_000_000}, "total": 7_000_000_000},
)
GGUF = listed("org/Qwen3-4B-GGUF", tags=["gguf"], gguf={"architecture": "qwen3", "total": 4_000_000_000})
UNREADABLE = [
    listed("org/other-type", config={"model_type": "no_such_type"}),
    listed("org/awq", config={"model_type": "llama", "quantization_config": {"quant_method": "awq"}}),
    listed("org/pickles", tags=["pytorch"], config={"model_type": "llama"}),
    listed("org/other-gguf", tags=["gguf"], gguf={"architecture": "no_such", "total": 1}),
    listed("org/bare"),
]


async def test_a_search_finds_what_can_be_read_here_with_its_size(hub: Hub) -> None:
    hub.listed = {"mlx": [MLX], "": [PLAIN, GGUF, MLX, *UNREADABLE]}
    page = await search("qwen3 4b")
    assert page.models == [
        HubModel("mlx-community/Qwen3-4B-4bit", "mlx", "qwen3", 2_260_000_000, 4, 5),
        HubModel("org/Mistral-7B", "safetensors", "mistral", 14_000_000_000, 0, 5, gated=True),
        HubModel("org/Qwen3-4B-GGUF", "gguf", "qwen3", 2_425_000_000, 4, 5),
    ]
    assert page.others == len(UNREADABLE)
    assert [asked["search"] for asked in hub.searched] == [["qwen3 4b"]] * 2
    assert [asked.get("filter") for asked in hub.searched] == [["mlx"], None]
    assert {asked["sort"][0] for asked in hub.searched} == {"downloads"}


def test_the_types_that_have_another_name_are_those_of_mlx_lm() -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    assert set(utils.MODEL_REMAPPING) == pull_search.OTHER_NAMES


async def test_words_that_look_like_an_option_are_words(hub: Hub) -> None:
    assert (await search("--help")).models == []
    assert hub.searched[0]["search"] == ["--help"]


async def test_without_a_network_a_search_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="could not be reached"):
        await search("qwen")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE forbids") as offline:
        await search("qwen")
    assert "Unset it" in offline.value.hint


async def test_a_hub_that_does_not_answer_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers = threading.Event()
    monkeypatch.setattr(limits, "HUB_SEARCH_S", 3.0)
    with pytest.raises(DownloadFailed, match="did not answer within 3 s"):
        await search("qwen")
    hub.answers.set()
