"""``python -m eval.fit_head [FOLDER]``: fit an MTP head to the default model, from its checksummed package.

    the model ──► its answers to many prompts ──► a head ──► FOLDER: the model, and mtp.safetensors

Answers and epochs are kept as they are made, in a folder named for what they come of: a run that was cut off
goes on. It takes an hour or two on two cores. Prints how often the head is right on prompts that it was not
fitted to, and the digests of answers and head. They are the same on processors of the same kind.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.harness.child import ROOT
from bench.harness.daemon import FITTED, MODEL, fetch_model
from eval import head_answers, head_prompts
from fleetd.engine.cpu import products
from fleetd.models import digest as digests
from fleetd.models.weights import HEAD_NAME

if TYPE_CHECKING:  # needs MLX, which is set up first
    from eval.head_training import Recipe

KEPT = FITTED.parent
# Changed whenever the answers or the head would be others for what else the digests are made of.
_ANSWERS_VERSION = _HEAD_VERSION = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.fit_head", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FITTED, help="is made, or its head is replaced"
    )
    parser.add_argument("--tokens", type=int, default=90_000, help="tokens of answers, about")
    parser.add_argument("--draft-tokens", type=int, default=8192, help="tokens that the head guesses among")
    args = parser.parse_args()
    fetch_model()
    answers = kept_answers()
    command = [sys.executable, "-m", "eval.head_answers", str(answers), "--tokens", str(args.tokens)]
    # A process of its own: answers are made as a worker makes them, by kernels that have no gradients.
    subprocess.run(command, cwd=ROOT, check=True)
    products.preload_blas()
    from eval.head_training import Recipe

    head = _fitted(answers, args.tokens, Recipe(draft_tokens=args.draft_tokens))
    _place(head, args.folder)
    print(f"head: sha256 {hashlib.sha256(head.read_bytes()).hexdigest()}")
    return 0


def kept_answers() -> Path:
    """The folder of the default model's answers, which need not be there yet. The model has to be."""
    return KEPT / f"answers-{_answers_digest()}"


def _fitted(folder: Path, tokens: int, recipe: Recipe) -> Path:
    """The file of a head that is fitted to the answers in a folder; it may be there already."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from eval import head_training

    pieces = head_answers.pieces_of(folder, tokens)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.read_bytes())
    print(f"answers: sha256 {digest.hexdigest()}", flush=True)
    digest.update(msgspec.json.encode([recipe, _HEAD_VERSION]))
    kept = KEPT / f"head-{digest.hexdigest()[:16]}"
    kept.mkdir(parents=True, exist_ok=True)
    if (kept / HEAD_NAME).exists():
        return kept / HEAD_NAME
    answers = [head_answers.read(piece) for piece in pieces]
    held = [head_answers.read(piece) for piece in head_answers.held_out(folder)]
    model, _ = load_model(MODEL.resolve())
    products.to_float32(model)
    draft_tokens, share = head_training.commonest(answers, recipe.draft_tokens, model.args.vocab_size)
    print(f"{len(draft_tokens)} draft tokens are {100 * share:.1f} % of the answers'", flush=True)
    mx.random.seed(recipe.seed)
    head = head_training.begun(model, draft_tokens, answers)

    def told(epoch: int, mean: float) -> None:
        right = head_training.acceptance(head, model, held, max(recipe.steps))
        print(f"epoch {epoch + 1}: loss {mean:.3f}, held-out drafts right {right}", flush=True)

    head_training.trained(head, model, answers, recipe, kept / "epoch.safetensors", told)
    head_training.save(head, kept / HEAD_NAME, digests.remembered_weights(MODEL.resolve(), None))
    return kept / HEAD_NAME


def _place(head: Path, folder: Path) -> None:
    """Copies of the model's files in a folder, and the head beside them: links out of it are refused."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in MODEL.resolve().iterdir():
        if not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)
    (folder / HEAD_NAME).write_bytes(head.read_bytes())


def _answers_digest() -> str:
    """Of all that the answers come of, but the processor."""
    asked = [*head_prompts.held_out(), *head_prompts.training()]
    manifest = (MODEL / "fleetd-manifest.json").read_bytes()
    settings = [head_answers.BATCH, head_answers.TOKENS, head_answers.TEMPERATURES, _ANSWERS_VERSION]
    return hashlib.sha256(manifest + msgspec.json.encode([asked, settings])).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
