"""The process that searches the hub: ``python -m fleetd.models.pull.search WORDS`` writes a ``SearchLine``.

huggingface_hub supplies the hub's address, the user's token, proxies and the offline switch.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from fleetd import limits
from fleetd.errors import DownloadFailed, FleetError
from fleetd.models.gguf.families import FAMILIES
from fleetd.models.hub_search import HubModel, HubPage, SearchLine
from fleetd.models.pull.hub import typed_failures
from fleetd.models.reporter import Reporter

# Models that are asked for: MLX copies, and of any kind, the most downloaded ones each.
_MOST = 40
_EXPANDED = ["config", "downloads", "gated", "gguf", "safetensors", "tags"]
# Bytes of a number, by its name in safetensors.
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
# Bits that a weight takes in the GGUF file that a pull prefers (Q4_K_M), about.
_GGUF_BITS = 4.85
# Model types that mlx-lm computes with the code of another one (its ``MODEL_REMAPPING``).
OTHER_NAMES = frozenset(
    {"mistral", "llava", "phi-msft", "falcon_mamba", "joyai_llm_flash", "kimi_k2", "qwen2_5_vl", "minimax_m2"}
    | {"iquestcoder", "xverse", "gemma4_unified", "deepseek_v41_text"}
)


def search(words: str) -> HubPage:
    """The models with these words in their names, MLX copies first. Raises DownloadFailed."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        raise DownloadFailed("HF_HUB_OFFLINE forbids asking the hub.", hint="Unset it and search again.")
    with typed_failures("a search", "Search again."):
        found = {each.id: each for each in (*_listed(words, "mlx"), *_listed(words))}
    models = [model for info in found.values() if (model := readable(info)) is not None]
    return HubPage(models, len(found) - len(models))


def _listed(words: str, *filters: str) -> Iterator[Any]:
    """The most downloaded models with these words. Without a network ``HfApi`` would try for minutes."""
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    asked = {"search": words, "filter": [*filters], "sort": "downloads", "limit": _MOST, "expand": _EXPANDED}
    address, wait_s = f"{HfApi().endpoint}/api/models", limits.HUB_SEARCH_S
    response = get_session().get(address, params=asked, headers=build_hf_headers(), timeout=wait_s)
    hf_raise_for_status(response)
    for item in response.json():
        yield ModelInfo(**{"siblings": None, **item})


def readable(info: Any) -> HubModel | None:
    """A model of the hub's listing; None if its files are not read here, or no code is for its type."""
    tags, config = set(info.tags or ()), info.config or {}
    kind, packed = str(config.get("model_type", "")), config.get("quantization_config") or {}
    found = partial(HubModel, info.id, downloads=info.downloads or 0, gated=bool(info.gated))
    gguf = getattr(info, "gguf", None) or {}
    if kind in _types() and "safetensors" in tags:
        if "mlx" in tags:
            bits = int(packed.get("bits", 0)) if isinstance(packed, Mapping) else 0
            return found("mlx", kind, _weights_bytes(info.safetensors), bits)
        # What other programs have quantised is packed as MLX does not pack it.
        if not packed:
            return found("safetensors", kind, _weights_bytes(info.safetensors))
    if (architecture := str(gguf.get("architecture", ""))) in FAMILIES:
        total = gguf.get("total")
        n_bytes = int(total * _GGUF_BITS / 8) if isinstance(total, int) and total > 0 else 0
        return found("gguf", architecture, n_bytes, 4)
    return None


def _weights_bytes(safetensors: Any) -> int:
    """Bytes of all tensors, by how many numbers of each kind there are; 0 if the hub did not count them."""
    parameters: Iterable[tuple[str, int]] = (getattr(safetensors, "parameters", None) or {}).items()
    return sum(_BYTES.get(kind, 1) * number for kind, number in parameters)


@cache
def _types() -> frozenset[str]:
    """The model types that mlx-lm has code for. It is not imported: that takes seconds."""
    spec = importlib.util.find_spec("mlx_lm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return OTHER_NAMES | {path.stem for folder in folders for path in Path(folder, "models").glob("*.py")}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleetd.models.pull.search", description="Search the hub for models."
    )
    parser.add_argument("words", help="words of the model's name")
    reporter = Reporter(as_json=True)
    try:
        page = search(parser.parse_args().words)
    except FleetError as error:
        reporter.close(None, error)
        return 1
    except Exception as error:  # the boundary of the process: the daemon gets a sentence, not a traceback
        reporter.close(None, DownloadFailed(f"The search failed: {error!r}.", hint="Report this."))
        return 1
    reporter.line(SearchLine(page=page))
    reporter.close("", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
