"""``python -m eval.fit_head [FOLDER]``: fit an MTP head to the default model, from its checksummed package.

    the model ──► texts that it read, and its answers to many prompts ──► a head ──► FOLDER: the model,
                                                                                     and mtp.safetensors

Texts, answers and epochs are kept as they are made, in a folder named for what they come of: a run that was
cut off goes on. It takes an hour or two on two cores. Prints how often the head is right on prompts that it
was not fitted to, and the digests of texts, answers and head. They are the same on processors of the same
kind.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.harness.child import ROOT
from bench.harness.daemon import FITTED, MODEL, fetch_model
from eval import head_answers, head_prompts, head_texts
from fleetd.engine.cpu import products
from fleetd.models import digest as digests
from fleetd.models.weights import HEAD_NAME

if TYPE_CHECKING:  # needs MLX, which is set up first
    from eval.head_training import Recipe

KEPT = FITTED.parent
# Changed whenever answers, texts or head would be others for what else the digests are made of.
_ANSWERS_VERSION = _TEXTS_VERSION = 1
_HEAD_VERSION = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.fit_head", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FITTED, help="is made, or its head is replaced"
    )
    parser.add_argument("--tokens", type=int, default=90_000, help="tokens of answers, about")
    parser.add_argument("--text-tokens", type=int, default=0, help="tokens of other texts, about")
    parser.add_argument("--draft-tokens", type=int, default=8192, help="tokens that the head guesses among")
    args = parser.parse_args()
    fetch_model()
    answers = KEPT / f"answers-{_answers_digest()}"
    texts = KEPT / f"texts-{_texts_digest()}"
    # Processes of their own: they compute as a worker does, by kernels that have no gradients.
    for module, folder, tokens in (
        (head_texts, texts, args.text_tokens),
        (head_answers, answers, args.tokens),
    ):
        command = [sys.executable, "-m", module.__name__, str(folder), "--tokens", str(tokens)]
        subprocess.run(command, cwd=ROOT, check=True)
    products.preload_blas()
    from eval.head_training import Recipe

    read = head_texts.pieces_of(texts, args.text_tokens)
    said = head_answers.pieces_of(answers, args.tokens)
    held = head_answers.held_out(answers)
    head = _fitted(read, said, held, Recipe(draft_tokens=args.draft_tokens))
    _place(head, args.folder)
    print(f"head: sha256 {hashlib.sha256(head.read_bytes()).hexdigest()}")
    return 0


def _fitted(read: Sequence[Path], said: Sequence[Path], held: Sequence[Path], recipe: Recipe) -> Path:
    """The file of a head that is fitted to texts and then to answers; it may be there already.

    Args:
        held: the answers by which it is judged.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from eval import head_training

    digest = hashlib.sha256(msgspec.json.encode([recipe, _HEAD_VERSION]))
    for name, pieces in (("texts", read), ("answers", said)):
        of_pieces = hashlib.sha256()
        for piece in pieces:
            of_pieces.update(piece.read_bytes())
        print(f"{name}: sha256 {of_pieces.hexdigest()}", flush=True)
        digest.update(of_pieces.digest())
    kept = KEPT / f"head-{digest.hexdigest()[:16]}"
    kept.mkdir(parents=True, exist_ok=True)
    if (kept / HEAD_NAME).exists():
        return kept / HEAD_NAME
    texts, answers, judged = ([head_answers.read(piece) for piece in each] for each in (read, said, held))
    model, _ = load_model(MODEL.resolve())
    products.to_float32(model)
    draft_tokens, share = head_training.commonest(answers, recipe.draft_tokens, model.args.vocab_size, texts)
    print(f"{len(draft_tokens)} draft tokens are {100 * share:.1f} % of the answers'", flush=True)
    mx.random.seed(recipe.seed)
    head = head_training.begun(model, draft_tokens, answers)

    def told(epoch: int, mean: float) -> None:
        right = head_training.acceptance(head, model, judged, max(recipe.steps))
        print(f"epoch {epoch + 1}: loss {mean:.3f}, held-out drafts right {right}", flush=True)

    head_training.trained(head, model, answers, recipe, kept / "epoch.safetensors", told, texts)
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


def _texts_digest() -> str:
    """Of all that the texts come of, but the processor."""
    manifest = (MODEL / "fleetd-manifest.json").read_bytes()
    read = [head_texts.texts(), head_texts.ROWS, head_texts.TOKENS, _TEXTS_VERSION]
    return hashlib.sha256(manifest + msgspec.json.encode(read)).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
