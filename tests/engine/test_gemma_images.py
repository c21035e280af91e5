"""Images in prompts for Gemma 3: the rows and the logits of transformers' own code.

``ROWS`` and ``ANSWERS`` were written down once from ``Gemma3ForConditionalGeneration`` and
``Gemma3ImageProcessorPil`` of transformers 5.24 on torch 2.13, with the weights of ``seeing_gemma``. The
model's window is shorter than an image, so that each of its masks decides.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import seeing_gemma
from disk_worker import Worker, settings_in
from mlx_lm.models.cache import KVCache, make_prompt_cache
from seeing_model import picture
from seer import Seer, asked

from fleetd.engine.layers.prefill import Prefiller, PromptRows
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import IMAGES, ChatPrompt, Finished
from fleetd.engine.vision.image_file import read_image
from fleetd.engine.vision.reader_files import read_image_reader
from fleetd.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")
# By the image's height and width: three pixels, the first row's first numbers, the last row's last ones, and
# the sum of all without their signs.
ROWS: dict[tuple[int, int], Any] = {
    (40, 24): {
        "pixels": [1.0, -0.30980390310287476, -0.929411768913269],
        "first": [-0.16557, -1.26466, 0.68852, 0.00451, -1.16282, -0.23988],
        "last": [0.61124, 0.34217, 0.10026, 0.4408, 2.03331, -0.48599],
        "sum": 727.476806640625,
    },
    (100, 30): {
        "pixels": [0.49803924560546875, -0.21568626165390015, -0.6549019813537598],
        "first": [-0.33601, -0.99534, 0.34997, 0.3492, -1.56098, -0.00736],
        "last": [-0.37852, 0.5986, 0.20423, 0.62195, 2.26492, -0.90834],
        "sum": 775.7523193359375,
    },
    (48, 48): {
        "pixels": [1.0, -0.3019607663154602, -0.7490196228027344],
        "first": [0.1977, -0.72664, 0.89365, 0.10755, -0.3919, -1.00691],
        "last": [-0.98442, -0.47492, 0.68409, -0.09483, 1.36997, -0.28039],
        "sum": 793.31591796875,
    },
}
# By the number of images: the prompt's tokens, the first logits behind it, the sum of these without their
# signs, and the tokens of a greedy answer, which end with a character.
ANSWERS: dict[int, Any] = {
    1: {
        "tokens": 51,
        "logits": [1.20846, -0.13187, -2.84136, 0.0418, 0.12847, 0.11431],
        "sum": 325.4609680175781,
        "greedy": [165, 165, 10, 71, 245, 48],
    },
    2: {
        "tokens": 72,
        "logits": [1.41096, -1.06404, -2.72068, -0.02614, -0.96301, -0.74924],
        "sum": 337.4103698730469,
        "greedy": [228, 228, 228, 41, 134, 228, 136, 100],
    },
}


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.on_cpu(seeing_gemma.write, tmp_path_factory.mktemp("gemma") / "gemma")


def shown(seer: Seer, images: int, name: str = "a") -> PreparedPrompt:
    """The prompt of ``ANSWERS`` with one image before the text, or another one within it."""
    files = [(0, picture(1)), (8, picture(2, 16, 48))]
    message = {"role": "user", "content": "What is this?", IMAGES: files[:images]}
    return seer.prepared(name, [message], max_tokens=len(ANSWERS[images]["greedy"]))


def rows_of(seer: Seer, prepared: PreparedPrompt) -> PromptRows:
    stage, images = Stage.of(seer.model), prepared.images
    assert images is not None
    return PromptRows(stage, partial(images.embedded, stage.embed), images.blocks, images.read_on)


def read(seer: Seer, prepared: PreparedPrompt, chunk: int, **begun: Any) -> mx.array:
    """The logits (V,) behind a prompt that is read in chunks."""
    cache = begun.pop("cache", None) or make_prompt_cache(seer.model)
    prefiller = Prefiller(seer.model, prepared.tokens, cache, rows=rows_of(seer, prepared), **begun)
    while prefiller.remaining:
        prefiller.step(chunk)
    logits: mx.array = seer.model(mx.array([prepared.tokens[-1:]]), cache=cache)[0, -1]
    return logits


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ROWS, ids=str)
def test_rows_are_those_of_the_makers_code(seer: Seer, size: tuple[int, int]) -> None:
    wanted = ROWS[size]
    patches = seer.reader.patches(read_image(picture(1, *size), "image"))
    assert patches.pixels.shape == (seeing_gemma.SIZE, seeing_gemma.SIZE, 3)
    pixels = seer.reader.settings.normalised(patches.pixels)
    places = ((0, 0, 0), (3, 5, 1), (47, 47, 2))
    assert [float(pixels[at]) for at in places] == pytest.approx(wanted["pixels"], abs=1e-6)
    rows = seer.reader(patches)
    assert rows.shape == (patches.rows, seeing_gemma.TEXT_WIDTH)
    assert rows[0][:6].tolist() == pytest.approx(wanted["first"], abs=2e-4)
    assert rows[-1][-6:].tolist() == pytest.approx(wanted["last"], abs=2e-4)
    assert float(mx.abs(rows).sum()) == pytest.approx(wanted["sum"], rel=1e-5)


@pytest.mark.parametrize("images", ANSWERS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_logits_are_those_of_the_makers_code(seer: Seer, images: int, chunk: int) -> None:
    wanted, prepared = ANSWERS[images], shown(seer, images)
    assert len(prepared.tokens) == wanted["tokens"]
    logits = read(seer, prepared, chunk)
    assert logits[:6].tolist() == pytest.approx(wanted["logits"], abs=2e-4)
    assert float(mx.abs(logits).sum()) == pytest.approx(wanted["sum"], rel=1e-5)


# ---- prompts ---------------------------------------------------------------------------------------------


def test_a_prompt_has_what_the_makers_put_around_an_image(seer: Seer) -> None:
    prepared = shown(seer, 1)
    image = "<start_of_image>" + "<image_soft_token>" * seeing_gemma.ROWS + "<end_of_image>"
    turn = f"<bos><start_of_turn>user\n\n\n{image}\n\nWhat is this?<end_of_turn>\n<start_of_turn>model\n"
    assert seer.tokenizer.decode(prepared.tokens) == turn
    assert prepared.images is not None
    first = prepared.tokens.index(seer.reader.row_token)
    assert prepared.images.blocks == [(first, first + seeing_gemma.ROWS)]


def test_names_of_tokens_are_those_of_the_tokenizer(seer: Seer, tmp_path: Path) -> None:
    path = seeing_gemma.write(tmp_path / "renamed")
    settings = path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("<end_of_image>", "<image_end>"))
    reader = read_image_reader(path, seer.config)
    assert reader is not None
    assert reader.patches(read_image(picture(1), "image")).text.endswith("<image_soft_token><image_end>\n\n")


@pytest.mark.parametrize("word", ["<start_of_image>", "<image_soft_token>"])
def test_a_token_of_images_that_a_user_writes_is_text(seer: Seer, word: str) -> None:
    prepared = seer.prepared("a", asked(picture(1), text=f"What does {word} mean?"))
    assert prepared.tokens.count(seer.reader.row_token) == seeing_gemma.ROWS
    assert f"{word} mean" in seer.tokenizer.decode(prepared.tokens)


@pytest.mark.parametrize("marked", [False, True])
def test_borders_are_found_in_a_conversation_that_began_with_an_image(seer: Seer, marked: bool) -> None:
    """For a model that keeps states at few places: its next turns go on there. A mark of the client where an
    image stands is behind it."""
    first = asked(picture(1), text="What?")
    talk = [*first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And now?"}]
    marks = [(0, len("What?"))] if marked else []
    prepared = seer.prepared("a", talk, cache_marks=marks)
    shown = [seer.tokenizer.decode(prepared.tokens[: border + 1]) for border in prepared.borders]
    assert shown[0].endswith("And now?")
    [(_, end)] = prepared.images.blocks if prepared.images is not None else []
    if marked:
        assert shown[1].endswith("<end_of_image>\n\nWhat?")
        assert prepared.borders[1] > end
    assert len(prepared.borders) == 4 + marked


def test_a_mark_at_an_image_is_behind_it(seer: Seer) -> None:
    text = "Look: "
    message = {"role": "user", "content": f"{text}What?", IMAGES: [(len(text), picture(1))]}
    prepared = seer.prepared("a", [message], cache_marks=[(0, len(text))])
    assert prepared.images is not None
    prompt = prepared.request.prompt
    assert isinstance(prompt, ChatPrompt)
    [(_, chars)] = prepared.images.shown_marks([message], prompt.cache_marks)
    shown = f"{text}\n\n<start_of_image>{'<image_soft_token>' * seeing_gemma.ROWS}<end_of_image>\n\n"
    assert chars == len(shown)


# ---- answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, 32, 512])
@pytest.mark.parametrize("images", ANSWERS)
def test_an_answer_is_that_of_the_makers_code(seer: Seer, images: int, chunk: int) -> None:
    run = seer.scheduler(chunks=FixedChunks(chunk, chunk))
    run.scheduler.tell(shown(seer, images))
    run.finish()
    assert run.text("a") == seer.tokenizer.decode(ANSWERS[images]["greedy"])


def test_answers_beside_each_other_see_their_own_images(seer: Seer) -> None:
    run = seer.scheduler(chunks=FixedChunks(4, 4))
    for images in ANSWERS:
        run.scheduler.tell(shown(seer, images, str(images)))
    run.finish()
    for images, wanted in ANSWERS.items():
        assert run.text(str(images)) == seer.tokenizer.decode(wanted["greedy"])


def test_a_conversation_goes_on_behind_its_image(seer: Seer) -> None:
    run = seer.scheduler()
    first = asked(picture(1))
    run.scheduler.tell(seer.prepared("one", first))
    run.finish()
    later = [*first, {"role": "assistant", "content": run.text("one")}, {"role": "user", "content": "And?"}]
    prepared = seer.prepared("two", later)
    run.scheduler.tell(prepared)
    run.finish()
    [ended] = run.of("two", Finished)
    assert prepared.images is not None
    assert ended.usage.cached_tokens >= prepared.images.blocks[0][1]
    alone = seer.scheduler()
    alone.scheduler.tell(seer.prepared("two", later))
    alone.finish()
    assert run.text("two") == alone.text("two")


def test_another_image_behind_the_same_text_begins_before_it(seer: Seer) -> None:
    """The end of a block of checkpoints is inside the images: the state is kept before them."""
    before = "x" * 240
    messages = [
        [{"role": "user", "content": f"{before}What is this?", IMAGES: [(len(before), picture(seed))]}]
        for seed in (1, 2)
    ]
    run = seer.scheduler()
    for name, each in zip(("one", "other"), messages, strict=True):
        run.scheduler.tell(seer.prepared(name, each))
        run.finish()
    prepared = seer.prepared("other", messages[1])
    assert prepared.images is not None
    [(first, end)] = prepared.images.blocks
    assert first < 256 < end
    [ended] = run.of("other", Finished)
    assert ended.usage.cached_tokens == first
    alone = seer.scheduler()
    alone.scheduler.tell(prepared)
    alone.finish()
    assert run.text("other") == alone.text("other")


def test_states_are_kept_at_images_borders_and_not_inside(seer: Seer) -> None:
    text = "x" * 240
    message = {"role": "user", "content": f"{text}What is this?", IMAGES: [(len(text), picture(1))]}
    prepared = seer.prepared("a", [message])
    rows = rows_of(seer, prepared)
    [(first, end)] = rows.blocks
    cache = make_prompt_cache(seer.model)
    borders = (first + 3, first + 9, end)
    prefiller = Prefiller(seer.model, prepared.tokens, cache, rows=rows, state_bytes=1 << 30, borders=borders)
    while prefiller.remaining:
        prefiller.step(32)
        assert not first < prefiller.done < end
    assert not [at for at in prefiller.states if first < at < end]
    assert first in prefiller.states


def test_the_rest_of_an_image_is_read_in_one(seer: Seer) -> None:
    """From a beginning inside an image that was computed with all of it, as the disk may have one."""
    prepared, left = shown(seer, 2), 6
    rows = rows_of(seer, prepared)
    _, end = rows.blocks[0]
    cache = make_prompt_cache(seer.model)
    prefiller = Prefiller(seer.model, prepared.tokens, cache, rows=rows)
    while prefiller.done < end:
        prefiller.step(8)
    for layer in cache:
        if isinstance(layer, KVCache):
            layer.trim(left)
        else:
            keys, values, offset, keep, size, index = layer.state
            cut = keys[..., :-left, :], values[..., :-left, :]
            layer.state = (*cut, offset - left, keep, size, index - left)
    logits = read(seer, shown(seer, 2), 4, cache=cache, done=end - left)
    assert logits[:6].tolist() == pytest.approx(ANSWERS[2]["logits"], abs=2e-4)


def test_the_disk_has_what_is_behind_an_image_and_nothing_inside(seer: Seer, tmp_path: Path) -> None:
    before, text = "x" * 240, "x" * 500

    def asking(seed: int) -> PreparedPrompt:
        return seer.prepared(
            str(seed), [{"role": "user", "content": text, IMAGES: [(len(before), picture(seed))]}]
        )

    def asked_of_a_new_worker(seed: int) -> tuple[int, str]:
        worker = Worker(seer.model, seer.tokenizer, settings_in(tmp_path))
        worker.scheduler.inbox.put(asking(seed))
        ended = worker.finish(str(seed))
        worker.stop()
        return ended.timings.restored_tokens, worker.text(str(seed))

    images = asking(1).images
    assert images is not None
    [(first, end)] = images.blocks
    assert first < 256 < end < 512 < len(asking(1).tokens)
    none, written = asked_of_a_new_worker(1)
    found, again = asked_of_a_new_worker(1)
    assert (none, found) == (0, 512)
    assert written == again
    assert asked_of_a_new_worker(2)[0] == 0


# ---- folders ---------------------------------------------------------------------------------------------


def test_rows_that_patches_do_not_fit_are_named(seer: Seer) -> None:
    with pytest.raises(ModelUnsupported, match="12 x 12 patches do not become 25 rows"):
        read_image_reader(seer.path, seer.config | {"mm_tokens_per_image": 25})
