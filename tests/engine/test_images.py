"""Images in prompts: the rows of transformers' own code, prompts that show them, and answers that see them.

``ROWS`` was written down once from ``PixtralVisionModel``, ``Mistral3MultiModalProjector`` and
``PixtralImageProcessor`` of transformers 5.24 on torch 2.13, with the weights of ``seeing_model``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import seeing_model
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace
from PIL import ImageFile
from seer import Seer, asked

from fleetd import limits
from fleetd.cache.block_names import names
from fleetd.engine.loop.sequence import new_sequence
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt, prepare
from fleetd.engine.protocol import (
    IMAGES,
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Keep,
    Prefill,
    Sampling,
    TextPrompt,
)
from fleetd.engine.vision import image_file
from fleetd.engine.vision.image_file import read_image
from fleetd.engine.vision.image_reader import ImagePatches
from fleetd.engine.vision.pixtral import Mistral3Reader
from fleetd.engine.vision.reader_files import read_image_reader
from fleetd.errors import BadRequest, InvalidValue, ModelUnsupported, PayloadTooLarge, UnsupportedParameter

pytestmark = pytest.mark.usefixtures("on_cpu")
VOCAB = 263
# By the image's height and width: the size at which it is read, three pixels, the first row's first numbers,
# the last row's last ones, and the sum of all without their signs.
ROWS: dict[tuple[int, int], Any] = {
    (40, 24): {
        "size": [40, 24],
        "pixels": [1.9303361177444458, -1.7220815420150757, -1.3522392511367798],
        "rows": 15,
        "first": [-1.54158, 0.60309, 3.46853, 6.51061, -4.89978, -1.33616],
        "last": [-3.69479, 2.13832, -4.07292, 3.13674, -0.24754, -4.15066],
        "sum": 2537.39697265625,
    },
    (100, 30): {
        "size": [48, 16],
        "pixels": [0.6018794178962708, 0.003811762435361743, -0.14353354275226593],
        "rows": 12,
        "first": [-2.46145, -0.08194, 2.56538, 6.2842, -1.00499, -2.15882],
        "last": [-3.27688, 2.53138, -1.79653, 2.85288, -1.47331, 0.2457],
        "sum": 1699.7650146484375,
    },
    (7, 50): {
        "size": [8, 48],
        "pixels": [1.9303361177444458, -0.9566853642463684, 0.6385701298713684],
        "rows": 6,
        "first": [0.31468, 5.30245, 0.69784, 4.12801, -1.42691, -1.09089],
        "last": [-5.48186, 0.93846, -1.29415, 1.10654, 0.49589, -0.1115],
        "sum": 828.9627685546875,
    },
}


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.on_cpu(seeing_model.write, tmp_path_factory.mktemp("seer") / "seer")


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ROWS, ids=str)
def test_rows_are_those_of_the_makers_code(seer: Seer, size: tuple[int, int]) -> None:
    wanted = ROWS[size]
    patches = seer.reader.patches(read_image(seeing_model.picture(1, *size), "image"))
    height, width, _ = patches.pixels.shape
    assert (height, width) == tuple(wanted["size"])
    pixels = seer.reader.settings.normalised(patches.pixels)
    places = ((0, 0, 0), (3, 5, 1), (height - 1, width - 1, 2))
    assert [float(pixels[at]) for at in places] == pytest.approx(wanted["pixels"], abs=1e-6)
    rows = seer.reader(patches)
    assert rows.shape == (patches.rows, seeing_model.TEXT_WIDTH)
    assert patches.rows == wanted["rows"]
    assert rows[0][:6].tolist() == pytest.approx(wanted["first"], abs=2e-4)
    assert rows[-1][-6:].tolist() == pytest.approx(wanted["last"], abs=2e-4)
    assert float(mx.abs(rows).sum()) == pytest.approx(wanted["sum"], rel=1e-5)


def test_attention_in_pieces_gives_the_rows_of_attention_in_one(
    seer: Seer, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = seer.reader.patches(read_image(seeing_model.picture(1, 48, 48), "image"))
    whole = seer.reader(patches)
    monkeypatch.setattr("fleetd.engine.vision.encoder_parts.QUERIES", 7)
    assert mx.allclose(seer.reader(patches), whole, atol=1e-5)


# ---- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", image_file.FORMATS)
def test_each_format_is_read(form: str) -> None:
    assert read_image(seeing_model.picture(1, 6, 9, form), "image").shape == (6, 9, 3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        seeing_model.picture(1)[:-40],
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
    ids=["empty", "text", "cut", "pdf", "svg"],
)
def test_what_is_no_image_is_refused_by_its_place(data: bytes) -> None:
    with pytest.raises(InvalidValue, match=r"^messages\[0\]: this is no image") as refused:
        read_image(data, "messages[0]")
    assert refused.value.param == "messages[0]"
    assert "PNG" in refused.value.hint


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = seeing_model.picture(1, 10, 11)
    monkeypatch.setattr(limits, "IMAGE_PIXELS", 100)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(PayloadTooLarge, match="11 x 10 pixels"):
        read_image(file, "image")


# ---- prompts ---------------------------------------------------------------------------------------------


def test_a_prompt_has_a_token_for_each_row_where_the_image_stands(seer: Seer) -> None:
    message = {"role": "user", "content": "Left right", IMAGES: [(5, seeing_model.picture(1, 16, 24))]}
    prepared = seer.prepared("a", [message])
    line = "[IMG][IMG][IMG]"
    shown = f"<s>[INST]Left {line}[IMG_BREAK]{line}[IMG_END]right[/INST]"
    assert seer.tokenizer.decode(prepared.tokens) == shown
    assert prepared.images is not None
    assert len(prepared.images.places) == 6


def test_a_placeholder_that_a_user_writes_is_text(seer: Seer) -> None:
    file = seeing_model.picture(1, 8, 8)
    prepared = seer.prepared("a", asked(file, text="What does [IMG] mean?"))
    assert prepared.images is not None
    assert len(prepared.images.places) == 1
    assert prepared.tokens.count(seer.reader.row_token) == 1
    assert "[IMG] mean" in seer.tokenizer.decode(prepared.tokens)


def test_a_text_model_refuses_images_and_says_why(seer: Seer) -> None:
    request = Generate("a", ChatPrompt(asked(seeing_model.picture(1))))
    for why in ("", "There is no memory for what it reads images with."):
        with pytest.raises(UnsupportedParameter) as refused:
            prepare(request, seer.tokenizer, VOCAB, model="seer", imageless=why)
        assert refused.value.message == f"seer reads text only: it cannot be sent images. {why}".rstrip()


def test_a_template_that_shows_no_images_is_named(seer: Seer, tmp_path: Path) -> None:
    path = seeing_model.write(tmp_path / "blind")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    request = Generate("a", ChatPrompt(asked(seeing_model.picture(1))))
    with pytest.raises(BadRequest, match="shows 0 of 1 images"):
        prepare(request, load_tokenizer(path), VOCAB, images=seer.reader, model="Blind")


def test_a_template_that_ends_with_an_image_is_refused(seer: Seer, tmp_path: Path) -> None:
    path = seeing_model.write(tmp_path / "last")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['role'] }}{% endfor %}[IMG]"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    reader = read_image_reader(path, seer.config)
    assert reader is not None
    # As of a family that puts nothing behind an image.
    patches = replace(reader.patches(read_image(seeing_model.picture(1, 8, 8), "image")), text="[IMG]")
    reader.patches = lambda image: patches
    request = Generate("a", ChatPrompt(asked(seeing_model.picture(1, 8, 8))))
    with pytest.raises(BadRequest, match="ends with an image"):
        prepare(request, load_tokenizer(path), VOCAB, images=reader, model="Last")


@pytest.mark.parametrize("images", [[["x", b"y"]], [[-1, b"x"]], [[2, b"x"], [1, b"y"]], "no list"], ids=str)
def test_images_of_another_machine_in_another_form_are_refused(seer: Seer, images: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^messages\[0\]: its images are"):
        seer.prepared("a", [{"role": "user", "content": "abc", IMAGES: images}])


def test_numbers_for_the_prefix_cache_go_by_content(seer: Seer) -> None:
    one, other = seeing_model.picture(1), seeing_model.picture(2)
    first, again, second = (seer.prepared("a", asked(file)) for file in (one, one, other))
    assert first.tokens == again.tokens == second.tokens
    assert first.keys == again.keys
    assert first.images is not None
    for place, (mine, theirs) in enumerate(zip(first.keys, second.keys, strict=True)):
        assert (mine == theirs == first.tokens[place]) != (place in first.images.places)
    assert len(set(first.keys)) > len(first.images.places)
    assert max(first.keys) < 2**63
    assert names(b"basis", "", first.keys * 99) != names(b"basis", "", second.keys * 99)


def test_the_same_pixels_in_another_file_are_the_same_prompt(seer: Seer) -> None:
    files = seeing_model.picture(1), seeing_model.picture(1, form="WEBP", lossless=True)
    one, other = (seer.prepared("a", asked(file)) for file in files)
    assert one.keys == other.keys


def test_names_of_blocks_of_text_are_as_they_were() -> None:
    """Blocks that lie on disks have names that must not change."""
    assert (
        names(b"basis", "dense", list(range(limits.CACHE_BLOCK_TOKENS)))[0]
        .hex()
        .startswith("1c3f762b0b89e022")
    )


# ---- answers ---------------------------------------------------------------------------------------------


def reference(seer: Seer, prepared: PreparedPrompt, n: int = 8) -> list[int]:
    """Greedy tokens by mlx-lm's model alone, given all embeddings at once."""
    assert prepared.images is not None
    model = seer.model
    patches = [image.patches for image in prepared.images.images]
    rows = mx.concatenate([seer.reader(each) for each in patches if each is not None])
    embeddings = model.language_model.model.embed_tokens(mx.array([prepared.tokens]))
    embeddings[:, mx.array(prepared.images.places)] = rows[None]
    found: list[int] = []
    while len(found) < n:
        logits = model(mx.zeros(embeddings.shape[:2], dtype=mx.int32), input_embeddings=embeddings)
        found.append(int(mx.argmax(logits[0, -1])))
        last = model.language_model.model.embed_tokens(mx.array([found[-1:]]))
        embeddings = mx.concatenate([embeddings, last], axis=1)
    return found


@pytest.mark.parametrize("chunk", [5, 32, 512])
def test_an_answer_is_that_of_the_model_given_the_rows(seer: Seer, chunk: int) -> None:
    messages = asked(seeing_model.picture(1), seeing_model.picture(2, 16, 48))
    wanted = reference(seer, seer.prepared("a", messages))
    run = seer.scheduler(chunks=FixedChunks(chunk, chunk))
    run.scheduler.tell(seer.prepared("a", messages))
    run.finish()
    assert run.text("a") == seer.tokenizer.decode(wanted)


def test_another_image_is_another_answer_and_the_same_one_is_read_once(seer: Seer) -> None:
    run = seer.scheduler()
    read = []
    for name, seed in (("one", 1), ("other", 2), ("again", 1)):
        run.scheduler.tell(seer.prepared(name, asked(seeing_model.picture(seed))))
        run.finish()
        [ended] = run.of(name, Finished)
        read.append(ended.usage.prompt_tokens - ended.usage.cached_tokens)
    assert run.text("one") == run.text("again") != run.text("other")
    # <s> and [INST] come before the image; the last token is always computed.
    assert (read[1], read[2]) == (read[0] - 2, 1)


def test_a_conversation_goes_on_behind_its_images(seer: Seer) -> None:
    run = seer.scheduler()
    first = asked(seeing_model.picture(1))
    run.scheduler.tell(seer.prepared("one", first))
    run.finish()
    later = [*first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And?"}]
    prepared = seer.prepared("two", later)
    run.scheduler.tell(prepared)
    run.finish()
    [ended] = run.of("two", Finished)
    assert prepared.images is not None
    assert ended.usage.cached_tokens > prepared.images.places[-1]
    assert run.text("two") == seer.tokenizer.decode(reference(seer, seer.prepared("two", later)))


def test_an_image_in_the_prefix_cache_is_not_looked_at_again(
    seer: Seer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = seer.scheduler()
    run.scheduler.tell(seer.prepared("one", asked(seeing_model.picture(1))))
    run.finish()
    monkeypatch.setattr(Mistral3Reader, "reading", lambda *_: pytest.fail("it was read"))
    run.scheduler.tell(seer.prepared("two", asked(seeing_model.picture(1))))
    run.finish()
    assert run.text("two") == run.text("one")


def test_others_have_their_turns_while_an_image_is_read(seer: Seer) -> None:
    """A layer of the encoder is a turn."""
    run = seer.scheduler(chunks=FixedChunks(512, 512))
    text = Generate("text", TextPrompt("Tell me"), Sampling(temperature=0.0), max_tokens=64, ignore_eos=True)
    run.scheduler.tell(prepare(text, seer.tokenizer, VOCAB))
    while not run.of("text", Delta):
        run.turn()
    run.scheduler.tell(seer.prepared("image", asked(seeing_model.picture(1))))
    while not run.of("image", Accepted):
        run.turn()
    before = sum(delta.tokens for delta in run.of("text", Delta))
    turns = 0
    while not run.of("image", Delta):
        run.turn()
        turns += 1
    # The machine that asked is told of each, or it would give this one up.
    told = [step.image_steps for step in run.of("image", Prefill)]
    assert told == [*range(seeing_model.LAYERS + 2), *told[-1:]]
    # A turn for each layer, one for the projection, one for the prompt's chunk, and one for the first token.
    assert turns >= seeing_model.LAYERS + 2
    assert sum(delta.tokens for delta in run.of("text", Delta)) - before >= seeing_model.LAYERS


def test_two_answers_beside_each_other_see_their_own_images(seer: Seer) -> None:
    alone = {}
    for seed in (1, 2):
        run = seer.scheduler()
        run.scheduler.tell(seer.prepared(str(seed), asked(seeing_model.picture(seed))))
        run.finish()
        alone[seed] = run.text(str(seed))
    run = seer.scheduler(chunks=FixedChunks(4, 4))
    for seed in (1, 2):
        run.scheduler.tell(seer.prepared(str(seed), asked(seeing_model.picture(seed))))
    run.finish()
    assert {seed: run.text(str(seed)) for seed in (1, 2)} == alone


@pytest.mark.parametrize("order", [(1, 1), (1, 2), (2, 1), (2, 1, 2)], ids=str)
def test_images_that_repeat_or_change_places_are_told_apart(seer: Seer, order: tuple[int, ...]) -> None:
    """The prefix cache has a prompt with each of them, and with both."""
    run = seer.scheduler()
    for name, seeds in (("one", (1,)), ("other", (2,)), ("both", (1, 2))):
        run.scheduler.tell(seer.prepared(name, asked(*map(seeing_model.picture, seeds))))
        run.finish()
    messages = asked(*map(seeing_model.picture, order))
    alone = seer.scheduler()
    for each in (run, alone):
        each.scheduler.tell(seer.prepared("a", messages, ignore_eos=True))
        each.finish()
    assert run.text("a") == alone.text("a") != ""
    [ended] = run.of("a", Finished)
    assert ended.usage.cached_tokens > 2


def test_choices_of_one_prompt_read_its_images_once(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FOLLOW_LEAST_TOKENS", 4)
    read: list[object] = []
    reading = Mistral3Reader.reading

    def counted(self: Mistral3Reader, patches: ImagePatches) -> Any:
        read.append(patches)
        return reading(self, patches)

    monkeypatch.setattr(Mistral3Reader, "reading", counted)
    run = seer.scheduler()
    for name in ("0", "1", "2"):
        run.scheduler.tell(seer.prepared(name, asked(seeing_model.picture(1))))
    run.finish()
    assert len(read) == 1
    assert run.text("0") == run.text("1") == run.text("2") != ""


def test_nothing_of_a_prompt_with_images_is_left_out(seer: Seer) -> None:
    prepared = seer.prepared("a", asked(seeing_model.picture(1)), keep=Keep({0: [(0, 4)]}))
    sequence = new_sequence(prepared, seer.tokenizer, None, KvBudget.of(1 << 30, 1024), 2048)
    assert sequence.kept is None


# ---- folders ---------------------------------------------------------------------------------------------


def test_an_activation_that_is_unknown_is_named(seer: Seer) -> None:
    vision = seer.config["vision_config"] | {"hidden_act": "swoosh"}
    with pytest.raises(ModelUnsupported, match="swoosh"):
        read_image_reader(seer.path, seer.config | {"vision_config": vision})
