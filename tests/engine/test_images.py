"""Images in prompts: the rows of transformers' own code, prompts that show them, and answers that see them.

``ROWS`` was written down once from ``PixtralVisionModel``, ``Mistral3MultiModalProjector`` and
``PixtralImageProcessor`` of transformers 5.24 on torch 2.13, with the weights of ``seeing_model``.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import seeing_model
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_config
from PIL import Image, ImageFile
from safetensors.numpy import save_file
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
from fleetd.engine.vision.pixtral import Mistral3Reader
from fleetd.engine.vision.reader_files import read_image_reader
from fleetd.errors import BadRequest, InvalidValue, ModelUnsupported, PayloadTooLarge, UnsupportedParameter
from fleetd.models.folder import read_folder

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
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    found = Seer(seeing_model.write(tmp_path_factory.mktemp("seer") / "seer"))
    mx.set_default_device(before)
    return found


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ROWS, ids=str)
def test_rows_are_those_of_the_makers_code(seer: Seer, size: tuple[int, int]) -> None:
    wanted = ROWS[size]
    patches = seer.reader.patches(read_image(seeing_model.picture(1, *size), "image"))
    height, width, _ = patches.pixels.shape
    assert (height, width) == tuple(wanted["size"])
    places = ((0, 0, 0), (3, 5, 1), (height - 1, width - 1, 2))
    assert [float(patches.pixels[at]) for at in places] == pytest.approx(wanted["pixels"], abs=1e-6)
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


def test_transparent_parts_are_white_and_photographs_stand_upright() -> None:
    clear, turned = io.BytesIO(), io.BytesIO()
    Image.new("RGBA", (2, 2), (10, 20, 30, 0)).save(clear, "PNG")
    assert read_image(clear.getvalue(), "image").tolist() == [[[255] * 3] * 2] * 2
    photograph = Image.new("RGB", (4, 2), "red")
    exif = photograph.getexif()
    exif[0x0112] = 6  # its left side is its bottom
    photograph.save(turned, "PNG", exif=exif)
    assert read_image(turned.getvalue(), "image").shape == (4, 2, 3)


def test_the_first_frame_of_an_animation_counts() -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 3), "white").save(
        file, "GIF", save_all=True, append_images=[Image.new("RGB", (3, 3), "black")]
    )
    assert read_image(file.getvalue(), "image").min() == 255


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
    rows = mx.concatenate([seer.reader(patches) for patches in prepared.images.patches])
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
    prepared = seer.prepared("a", messages)
    run = seer.scheduler(chunks=FixedChunks(chunk, chunk))
    run.scheduler.tell(prepared)
    run.finish()
    assert run.text("a") == seer.tokenizer.decode(reference(seer, prepared))


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
    assert run.text("two") == seer.tokenizer.decode(reference(seer, prepared))


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


def test_nothing_of_a_prompt_with_images_is_left_out(seer: Seer) -> None:
    prepared = seer.prepared("a", asked(seeing_model.picture(1)), keep=Keep({0: [(0, 4)]}))
    sequence = new_sequence(prepared, seer.tokenizer, None, KvBudget.of(1 << 30, 1024), 2048)
    assert sequence.kept is None


# ---- folders ---------------------------------------------------------------------------------------------


def test_a_folder_says_whether_its_model_reads_images(seer: Seer, tmp_path: Path) -> None:
    def found(path: Path) -> bool:
        return read_folder(path, name="m", source="folder", revision=None).shape.images

    assert found(seer.path)
    bare = seeing_model.write(tmp_path / "bare", vision=False)
    assert not found(bare)
    assert read_image_reader(bare, load_config(bare)) is None


def test_quantised_weights_are_read_as_they_lie_there(seer: Seer, tmp_path: Path) -> None:
    path = seeing_model.write(tmp_path / "packed")
    reader = read_image_reader(path, seer.config)
    assert reader is not None
    nn.quantize(reader, group_size=32, bits=8, class_predicate=lambda name, _: name.endswith("q_proj"))
    weights = {f"model.{name}": array for name, array in tree_flatten(reader.parameters())}
    mx.save_safetensors(str(path / "model-vision.safetensors"), weights)
    text = seeing_model.text_weights(VOCAB)
    save_file(text, path / "model.safetensors")
    config = seer.config | {"quantization": {"group_size": 32, "bits": 8}}
    again = read_image_reader(path, config)
    assert again is not None
    patches = seer.reader.patches(read_image(seeing_model.picture(1), "image"))
    assert mx.allclose(again(patches), reader(patches), atol=1e-5)


@pytest.mark.parametrize("lack", ["vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"])
def test_weights_that_are_missing_are_named(seer: Seer, tmp_path: Path, lack: str) -> None:
    path = seeing_model.write(tmp_path / "torn")
    weights = seeing_model.text_weights(VOCAB) | seeing_model.vision_weights()
    del weights[lack]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=lack):
        read_image_reader(path, seer.config)


def test_an_activation_that_is_unknown_is_named(seer: Seer) -> None:
    vision = seer.config["vision_config"] | {"hidden_act": "swoosh"}
    with pytest.raises(ModelUnsupported, match="swoosh"):
        read_image_reader(seer.path, seer.config | {"vision_config": vision})
