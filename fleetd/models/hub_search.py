"""The daemon's side of a search of the hub: a process asks, as the daemon imports no download library."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

import msgspec

from fleetd import limits
from fleetd.errors import DownloadFailed
from fleetd.models import child
from fleetd.models.pull_lines import PullLine
from fleetd.text.bounded import Count


class HubModel(msgspec.Struct, frozen=True):
    """A model of the hub whose files can be read here."""

    # Its repository.
    hub_id: str
    # What its files are: "mlx", "safetensors" or "gguf".
    files: str
    # ``model_type`` of its config, or the architecture of its GGUF files.
    architecture: str
    # Bytes of its weights, about; 0 if the hub does not say.
    download_bytes: Count = 0
    # Bits of a packed weight; 0 if the weights are not packed.
    bits: int = 0
    # How often it was downloaded in the last month.
    downloads: Count = 0
    # The hub gives it only to people who have accepted its terms.
    gated: bool = False


class HubPage(msgspec.Struct, frozen=True):
    """What a search has found: models that can be read here, and how many others there were."""

    models: list[HubModel]
    others: int = 0


class SearchLine(PullLine, frozen=True):
    """A line of the process's output; one of them has the page."""

    page: HubPage | None = None


async def search(words: str) -> HubPage:
    """The models of the hub with these words in their names.

    Raises:
        DownloadFailed: the hub cannot be reached, may not be asked, or does not answer in time.
    """
    module = "fleetd.models.pull.search"
    by_hand = f"Try it by hand to see more: {sys.executable} -m {module} {words!r}"
    page = HubPage([])
    try:
        async with (
            asyncio.timeout(limits.HUB_SEARCH_S),
            child.running(module, "--", words, stdin=asyncio.subprocess.DEVNULL) as process,
            aclosing(child.lines(process, SearchLine, "The search", by_hand)) as lines,
        ):
            async for line in lines:
                page = line.page or page
    except TimeoutError:
        raise DownloadFailed(
            f"The hub did not answer within {limits.HUB_SEARCH_S:.0f} s.",
            hint="Check the network and search again.",
        ) from None
    return page
