"""Memory of images in prompts: what waits, what is read, and that all of it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import seeing_model
from seer import Seer, asked
from turned_scheduler import TurnedScheduler

from fleetd import limits
from fleetd.engine.loop.sequence import check_fits
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import IMAGES, Accepted, Cancel, ChatPrompt, Delta, Finished
from fleetd.engine.vision import encoder_parts
from fleetd.engine.vision.encoder_parts import PassSizes
from fleetd.engine.vision.pixtral import PixtralConfig, PixtralEncoder
from fleetd.engine.vision.prompt_images import PromptImages
from fleetd.engine.vision.siglip import SiglipConfig, SiglipEncoder
from fleetd.errors import InvalidValue, OutOfMemory
from fleetd.models.memory_need import WORKING_BYTES

pytestmark = pytest.mark.usefixtures("on_cpu")
TOKEN_BYTES = 1024


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.on_cpu(seeing_model.write, tmp_path_factory.mktemp("seer") / "seer")


def seen(prepared: PreparedPrompt) -> PromptImages:
    assert prepared.images is not None
    return prepared.images


def arrays(images: PromptImages) -> list[str]:
    """What images hold."""
    found: list[str] = []
    for image in images.images:
        found += ["file"] * bool(image.file)
        found += ["pixels"] * (image.patches is not None)
        found += ["rows"] * (image.rows is not None)
    return found


def until(run: TurnedScheduler, reached: Callable[[], Any]) -> None:
    """Turn until it is so, which is soon."""
    for _ in range(1000):
        if reached():
            return
        run.turn()
    pytest.fail(f"never: {run.events}")


# ---- one prompt ------------------------------------------------------------------------------------------


def test_a_prompt_has_its_images_as_bytes_and_each_file_once(seer: Seer) -> None:
    prepared = seer.prepared("a", asked(seeing_model.picture(1)))
    (image,) = seen(prepared).images
    assert image.patches is not None
    assert image.patches.pixels.dtype == np.uint8
    prompt = prepared.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert not prompt.images
    assert prompt.messages[0]["content"] == "What is this?"


def test_memory_falls_as_a_prefill_goes_on_and_nothing_is_left_behind_it(seer: Seer) -> None:
    prepared = seer.prepared(
        "a", asked(seeing_model.picture(1), seeing_model.picture(2)), max_tokens=64, ignore_eos=True
    )
    images, run = seen(prepared), seer.scheduler(chunks=FixedChunks(16, 16))
    run.scheduler.tell(prepared)
    held = [images.held_bytes]
    while not run.of("a", Delta):
        run.turn()
        promised = run.scheduler.budget.used_bytes
        [sequence] = [*run.scheduler._prefilling, *run.scheduler.decoding.sequences]
        assert promised == images.held_bytes + sequence.promised * TOKEN_BYTES
        assert sum(array.nbytes for array in (each.rows for each in images.images) if array is not None) <= (
            images.held_bytes
        )
        held.append(images.held_bytes)
    assert held == sorted(held, reverse=True)
    assert len(set(held)) >= 3
    assert held[-1] == 0
    assert arrays(images) == []
    run.finish()
    assert run.scheduler.budget.used_bytes == 0


def test_images_that_are_in_the_prefix_cache_are_let_go_at_once(seer: Seer) -> None:
    run = seer.scheduler()
    run.scheduler.tell(seer.prepared("one", asked(seeing_model.picture(1))))
    run.finish()
    again = seer.prepared("two", asked(seeing_model.picture(1)), max_tokens=64, ignore_eos=True)
    run.scheduler.tell(again)
    until(run, lambda: run.of("two", Delta))
    assert len(run.scheduler.decoding) == 1
    assert arrays(seen(again)) == []
    assert seen(again).held_bytes == 0


def test_what_is_cancelled_while_an_image_is_read_gives_all_back(seer: Seer) -> None:
    run, prepared = seer.scheduler(), seer.prepared("a", asked(seeing_model.picture(1)))
    images = seen(prepared)
    run.scheduler.tell(prepared)
    until(run, lambda: images._reading)
    run.scheduler.tell(Cancel("a"))
    run.turn()
    [ended] = run.of("a", Finished)
    assert ended.reason == "cancelled"
    assert (images._reading, arrays(images)) == (None, [])
    assert run.scheduler.budget.used_bytes == 0
    run.scheduler.tell(seer.prepared("b", asked(seeing_model.picture(1))))
    run.finish()
    assert run.text("b")


def test_each_step_of_reading_an_image_is_progress(seer: Seer) -> None:
    """A worker that has work and takes no step is ended."""
    run, prepared = seer.scheduler(), seer.prepared("a", asked(seeing_model.picture(1)))
    run.scheduler.tell(prepared)
    until(run, lambda: seen(prepared)._reading)
    turns = 0
    while seen(prepared)._reading is not None:
        before = run.scheduler._figures().steps
        run.turn()
        assert run.scheduler._figures().steps > before
        turns += 1
    assert turns >= seeing_model.LAYERS


def test_an_image_of_a_prompt_that_is_prepared_is_progress(seer: Seer) -> None:
    run = seer.scheduler()
    before = run.scheduler._figures().steps
    seer.prepared("a", asked(*map(seeing_model.picture, (1, 2))), image_seen=run.scheduler.note_prepared)
    assert run.scheduler._figures().steps == before + 2


# ---- admission -------------------------------------------------------------------------------------------


def test_images_count_where_a_prompt_is_admitted(seer: Seer) -> None:
    prepared = seer.prepared("a", asked(seeing_model.picture(1)))
    need = (len(prepared.tokens) + 1) * TOKEN_BYTES + seen(prepared).held_bytes
    check_fits(prepared, None, KvBudget.of(need, TOKEN_BYTES), 2048)
    with pytest.raises(OutOfMemory, match=r"KV cache, and its images \d+ MB; this model has") as refused:
        check_fits(prepared, None, KvBudget.of(need - 1, TOKEN_BYTES), 2048)
    assert "Leave out images" in refused.value.hint


def test_a_prompt_that_just_fits_alone_is_read(seer: Seer) -> None:
    """With all that is promised to others for their answers it would not."""
    prepared = seer.prepared("a", asked(seeing_model.picture(1)), max_tokens=100)
    need = (len(prepared.tokens) + 1) * TOKEN_BYTES + seen(prepared).held_bytes
    run = seer.scheduler(budget=KvBudget.of(need, TOKEN_BYTES))
    run.scheduler.tell(prepared)
    run.turn(2)
    assert not run.scheduler._waiting
    run.finish()
    [ended] = run.of("a", Finished)
    assert ended.usage.completion_tokens > 0


def test_a_prompt_that_waits_for_memory_has_files_only_and_the_same_answer(seer: Seer) -> None:
    alone = seer.scheduler()
    alone.scheduler.tell(seer.prepared("two", asked(seeing_model.picture(2))))
    alone.finish()
    one, two = (seer.prepared(name, asked(seeing_model.picture(n))) for n, name in ((1, "one"), (2, "two")))
    both = sum(len(each.tokens) + 8 for each in (one, two)) * TOKEN_BYTES
    run = seer.scheduler(budget=KvBudget.of(both + seen(one).held_bytes, TOKEN_BYTES))
    run.scheduler.tell(one)
    run.turn()
    run.scheduler.tell(two)
    until(run, lambda: run.of("two", Accepted))
    run.turn()
    assert len(run.scheduler._waiting) == 1
    assert arrays(seen(two)) == ["file"]
    run.finish()
    assert run.text("two") == alone.text("two")


def test_another_machine_sends_no_more_images_than_a_client(seer: Seer) -> None:
    half = limits.IMAGES // 2 + 1
    files = [(0, seeing_model.picture(1, 8, 8))] * half
    talk = [{"role": "user", "content": "What?", IMAGES: files} for _ in range(2)]
    talk.insert(1, {"role": "assistant", "content": "A cat."})
    with pytest.raises(InvalidValue, match=f"more than {limits.IMAGES} images"):
        seer.prepared("a", talk)


# ---- a pass ----------------------------------------------------------------------------------------------


def peaks(encoder: Any, side: int) -> Iterator[tuple[int, int]]:
    """Bytes that a pass takes at most in each step, and that it holds after it."""
    mx.eval(encoder.parameters())
    pixels = mx.array(np.ones((side, side, 3), dtype=np.float32))
    before = mx.get_active_memory()
    reading = encoder.reading(pixels)
    del pixels
    while True:
        mx.reset_peak_memory()
        try:
            next(reading)
        except StopIteration as ended:
            mx.eval(ended.value)
            return
        yield mx.get_peak_memory() - before, mx.get_active_memory() - before


def siglip() -> SiglipEncoder:
    size = {"hidden_size": 64, "intermediate_size": 240, "num_attention_heads": 4}
    return SiglipEncoder(SiglipConfig(**size, num_hidden_layers=2, image_size=168))


def pixtral() -> PixtralEncoder:
    size = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    return PixtralEncoder(PixtralConfig(**size, num_hidden_layers=2, patch_size=8))


@pytest.mark.parametrize(("encoder", "side"), [(siglip, 168), (pixtral, 96)], ids=["siglip", "pixtral"])
def test_a_pass_takes_no_more_than_is_counted(
    monkeypatch: pytest.MonkeyPatch, encoder: Any, side: int
) -> None:
    monkeypatch.setattr(encoder_parts, "QUERIES", 64)
    made = encoder()
    sizes, patches = made.sizes, (side // made.sizes.patch) ** 2
    found = list(peaks(made, side))
    assert len(found) > 2 * made.config.num_hidden_layers
    most, held = max(peak for peak, _ in found), max(after for _, after in found)
    assert held <= sizes.held_bytes(patches)
    assert most <= sizes.held_bytes(patches) + sizes.step_bytes(patches)


def test_a_step_within_the_memory_of_each_pass_is_not_counted_twice() -> None:
    sizes = PassSizes(width=1152, inner=4304, heads=16, patch=14, item_bytes=2)
    assert sizes.step_bytes(4096) < WORKING_BYTES
    assert sizes.pass_bytes(4096) == sizes.held_bytes(4096) == 2 * 8 * 1152 * 4096
    large = PassSizes(width=1024, inner=4096, heads=16, patch=14, item_bytes=4)
    assert large.pass_bytes(12_100) == large.held_bytes(12_100) + large.step_bytes(12_100) - WORKING_BYTES
