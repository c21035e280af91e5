"""The memory that a publisher's files can take: their templates, their configs, their headers."""

from __future__ import annotations

import gc
import json
import multiprocessing
import re
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chain_model
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from mlx.utils import tree_flatten
from tiny_architectures import tiny
from transformers.utils.chat_template_utils import render_jinja_template

from fleetd import limits
from fleetd.control.model_facts import StateSizes
from fleetd.engine import worker
from fleetd.engine.cpu import address_space, packed_layers, products
from fleetd.engine.cpu.arithmetic import BLOCKS, Kernel
from fleetd.engine.load import loading, model_reading, stage_loading
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prompt import chat_template
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import FleetError, ModelCorrupt, OutOfMemory
from fleetd.limits import GIB, MIB
from fleetd.models.memory_need import GroupSizes, WeightRules, cpu_sizes, weight_need
from fleetd.models.safetensors_header import DTYPE_BYTES, TensorInfo, parse, read_header
from fleetd.models.verify import _COUNTED, check_configs

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS ignores address-space limits")

# ---- Templates -------------------------------------------------------------------------------------------

_TIMES = "{% set ns = namespace(x='x') %}{% for i in range(50) %}"
EXPLOSIONS = {
    "doubled": _TIMES + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added": _TIMES + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "multiplied": "{{ 'x' * 10 ** 12 }}",
    "a list multiplied": "{{ ([0] * 10 ** 11) | length }}",
    "joined": _TIMES + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "formatted": _TIMES + "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}{% endfor %}",
    "padded": "{{ '%0*d' % (10 ** 12, 1) }}",
    "centred": "{{ 'x' | center(10 ** 12) }}",
    "replaced": "{% set ns = namespace(x='xx') %}{% for i in range(50) %}"
    "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
    "a number": "{{ ('9' * 10 ** 12) | int }}",
    "filled": "{{ '1'.zfill(10 ** 12) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 12) }}",
    "put between": _TIMES + "{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "indented": "{{ 'x\nx' | indent(10 ** 12) }}",
    "as JSON": "{{ [1] | tojson(indent=10 ** 12) }}",
    "in a batch": "{{ [1] | batch(10 ** 12, 'x') | list | length }}",
    "a list added": "{% set ns = namespace(x=[0]) %}{% for i in range(50) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "texts in a list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + ['x' * (524288 + i)] %}{% endfor %}",
    "written": "{% for i in range(99999) %}{{ 'x' * (524288 + i) }}{% endfor %}",
}

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


# Too much where it is bounded; elsewhere it fails next.
GROWS = "{% set all.y = 'x' * 64 * 2 ** 20 %}{{ x.y.z }}"


class TemplateHeld(list[str]):
    """What a template takes hold of; unlike a list it can be referred to weakly."""


class Tokenizer:
    """``held``: the ``TemplateHeld`` of its last rendering."""

    held: weakref.ref[TemplateHeld]

    def __init__(self, template: str) -> None:
        self._template = template

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        held = TemplateHeld()
        self.held = weakref.ref(held)
        text: str = render_jinja_template([messages], chat_template=self._template, held=held)[0][0]
        return text


def rendered(templates: list[str], telling: Any) -> None:
    """Runs in a process of its own, whose memory is measured, with small bounds."""
    limits.RENDER_BYTES = 64 * MIB
    limits.RENDER_LEFT_BYTES = 16 * MIB
    chat_template.WORKING_BYTES = 0
    before, outcomes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for template in templates:
        try:
            # Keys and values may take much more at the same time.
            with address_space.at_most(4 * GIB):
                chat_template.rendered(Tokenizer(template), MESSAGES, None)
            outcomes.append("rendered")
        except Exception as error:
            outcomes.append(type(error).__name__)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    telling.send(((after - before) * 1024, outcomes))


@linux
def test_attack_templates_that_grow_without_end_stop_at_the_bound() -> None:
    # Not a fork: a copy of one thread of this process has the locks that its other threads held.
    fresh = multiprocessing.get_context("spawn")
    told, telling = fresh.Pipe(duplex=False)
    templates = ["{{ messages[0].content }}", *EXPLOSIONS.values()]
    child = fresh.Process(target=rendered, args=(templates, telling), daemon=True)
    child.start()
    telling.close()
    grown, outcomes = told.recv()
    child.join()
    assert outcomes[0] == "rendered"
    by_kind = dict(zip(EXPLOSIONS, outcomes[1:], strict=True))
    assert set(by_kind.values()) <= {"MemoryError", "OverflowError"}, by_kind
    # What one leaves behind, the next one finds mapped.
    assert grown < 4 * 64 * MIB


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "as on macOS"])
@pytest.mark.parametrize("ends", [GROWS, "{{ raise_exception('no') }}", "text"])
def test_what_a_template_has_built_does_not_outlive_it(
    monkeypatch: pytest.MonkeyPatch, ends: str, bounded: bool
) -> None:
    """In circles, and in the frames of its error."""
    monkeypatch.setattr(limits, "RENDER_BYTES", 64 * MIB)
    monkeypatch.setattr(limits, "RENDER_LEFT_BYTES", -GIB)
    monkeypatch.setattr(chat_template, "WORKING_BYTES", 0)
    made = Tokenizer("{% set all = namespace(x=held) %}{% set all.all = all %}" + ends)
    errors: list[Exception] = []
    gc.disable()
    try:
        with address_space.at_most(4 * GIB, "cpu" if bounded else "metal"):
            chat_template.rendered(made, MESSAGES, None)
    except (MemoryError, TemplateError) as error:
        errors.append(error)
    left = made.held()
    gc.enable()
    assert left is None, errors


def test_a_large_agents_prompt_is_rendered_as_without_a_bound() -> None:
    """Eight MB in four hundred messages."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    roles = ["user", "assistant"] * 200
    talk = [{"role": role, "content": f"{at} " + "text " * 4000} for at, role in enumerate(roles)]
    with address_space.at_most(4 * GIB):
        text = chat_template.rendered(Tokenizer(template), talk, None)
    assert text == "".join(f"<{m['role']}>{m['content'].strip()}\n" for m in talk)


def test_every_chat_template_is_rendered_within_its_bound() -> None:
    code = Path(address_space.__file__).parents[1]
    found = {file.name for file in code.rglob("*.py") if "apply_chat_template(" in file.read_text("utf-8")}
    assert found == {"chat_template.py"}


@linux
def test_a_template_has_its_own_bound_and_what_others_are_promised_is_beside_it() -> None:
    def left() -> int:
        return resource.getrlimit(resource.RLIMIT_AS)[0]

    budget = KvBudget(8 * GIB, StateSizes(1, 0, 0, 0), address_space.promised)
    with address_space.narrowed(MIB):
        free = left()
        with address_space.at_most(64 * GIB):
            wide = left()
            with address_space.narrowed(GIB):
                narrow = left()
                assert narrow < wide - 62 * GIB
                budget.take_memory("a", 2 * GIB)
                assert left() == narrow + 2 * GIB
                budget.give_back("a")
                # What it had may be mapped still, and is used again.
                assert left() == narrow + 2 * GIB
                budget.take_memory("b", GIB)
                assert left() == narrow + 3 * GIB
            with address_space.narrowed(GIB):
                assert left() == pytest.approx(narrow + GIB, abs=256 * MIB)
    budget.give_back("b")
    assert left() == free


@linux
def test_bounds_that_overlap_end_with_the_last_one() -> None:
    def soft() -> int:
        return resource.getrlimit(resource.RLIMIT_AS)[0]

    def bounded(more_bytes: int, then: Callable[[], int]) -> int:
        with address_space.at_most(more_bytes):
            return then()

    seen: list[int] = []
    free = soft()
    with address_space.at_most(64 * GIB):
        wide = soft()
        # Another thread's.
        bound = threading.Thread(target=lambda: seen.append(bounded(GIB, soft)))
        bound.start()
        bound.join()
        assert seen == [wide], "the other's work must not fail"
        assert soft() == wide
        with pytest.raises(MemoryError):
            bytearray(100 * GIB)
    assert soft() == free
    with address_space.at_most(GIB, "cuda"):
        assert soft() == free


# ---- Sizes from headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), (3, 128), (0, 0)])
def test_headers_tell_what_a_model_takes_in_memory(
    tmp_path: Path, bits: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model itself says it once it is built, on a processor whose kernels of any block are exact. One
    where the largest blocks are not takes more scales, and its worker counts them when it loads."""
    exact = tuple(Kernel(each, block, 1) for each in (4, 8) for block in BLOCKS)
    monkeypatch.setattr(packed_layers, "kernels", lambda: exact)
    model = tiny("llama")
    if bits:
        nn.quantize(model, group if group <= 128 else 64, bits)
    else:
        model.set_dtype(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    found = cpu_sizes(read_header(tmp_path / "model.safetensors"), GroupSizes(group or 128), plain=not bits)
    assert found.float32 == products.float32_bytes(model)
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    assert found.int8 == pytest.approx(packed_layers.int8_bytes(model, plain=not bits, tied=tied), rel=0.001)
    # Whatever the config says of the unpacked model or of bits.
    for config in ({"torch_dtype": "float32"}, {"quantization": {"bits": 32, "group_size": group}}):
        on_disk = (tmp_path / "model.safetensors").stat().st_size
        wide = weight_need(tmp_path, on_disk, config, WeightRules("cpu", "float32"))
        assert wide.n_bytes >= products.float32_bytes(model)
        assert weight_need(tmp_path, on_disk, config, WeightRules("metal")).n_bytes == on_disk


names = st.sampled_from(["a.weight", "a.scales", "a.biases", "b.weight", "b.scales", "weight", "c"])
tensors = st.dictionaries(
    names,
    st.builds(
        lambda dtype, shape: TensorInfo(dtype, tuple(shape), 0, int(np.prod(shape)) * DTYPE_BYTES[dtype]),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 1 << 16), max_size=3),
    ),
)


@examples(50)
@given(tensors, st.integers(1, 128), st.booleans())
def test_any_header_has_a_size(found: dict[str, TensorInfo], group: int, plain: bool) -> None:
    """At most a bit for each weight, so it is bounded by the size of the file."""
    sizes = cpu_sizes(found, GroupSizes(group), plain=plain)
    for total in (sizes.float32, sizes.int8):
        assert 0 <= total <= sum(128 * max(1, info.end) for info in found.values())


@given(st.binary(max_size=60), st.integers(0, 1 << 20))
def test_attack_headers_of_any_bytes(raw: bytes, size: int) -> None:
    try:
        parse(raw, size, "file")
    except ModelCorrupt:
        pass


numbers = st.integers(-(1 << 70), 1 << 70)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*sorted(DTYPE_BYTES), "X", ""]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, max_size=3),
    }
)


@examples(50)
@given(st.dictionaries(st.text(max_size=3), entries, max_size=4), st.integers(0, 1 << 40))
def test_attack_headers_that_lie_about_offsets(header: dict[str, Any], size: int) -> None:
    """Either every byte belongs to one tensor, or the file is corrupt."""
    raw = json.dumps(header).encode()
    try:
        found = parse(raw, size, "file")
    except ModelCorrupt:
        return
    assert sum(info.end - info.begin for info in found.values()) == size - 8 - len(raw)


# ---- Configs ---------------------------------------------------------------------------------------------


def test_every_count_that_an_architecture_builds_by_is_bounded() -> None:
    """By the library's own code: whatever it makes a list of so many parts of."""
    code = Path(mlx_lm.__file__).parent / "models"
    built = re.compile(r"range\((?:\d+, )?(?:self\.)?(?:args|config)(?:\.\w+)*\.(\w+)\)")
    found = {name for file in code.glob("*.py") for name in built.findall(file.read_text())}
    assert len(found) >= 8
    assert [name for name in sorted(found) if not _COUNTED.search(name)] == []


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["num_hidden_layers", "n_layer", "vocab_size", "quantization", "bits", "text_config", "rope_scaling", "x"]
)


@examples(40)
@given(st.dictionaries(KEYS, json_values, max_size=5))
def test_attack_configs_of_any_values(tmp_path_factory: pytest.TempPathFactory, odd: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp() / "odd-config"
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", **odd}
    (folder / "config.json").write_text(json.dumps(config))
    try:
        check_configs(folder)
    except FleetError:
        return
    for key, value in config.items():
        if _COUNTED.search(key) and isinstance(value, int | float):
            assert value <= limits.LAYERS if "layer" in key else 1 << 16


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., WorkerSettings]:
    path = chain_model.build(tmp_path_factory.mktemp("odd") / "odd")
    text = (path / "config.json").read_text()

    def change(**values: Any) -> WorkerSettings:
        (path / "config.json").write_text(json.dumps({**json.loads(text), **values}))
        return WorkerSettings(name="odd", path=str(path), speculation="off")

    return change


@pytest.mark.usefixtures("cpu_installed")
def test_a_workers_requests_are_promised_their_memory_beside_a_templates(
    odd: Callable[..., WorkerSettings],
) -> None:
    settings = odd()
    loaded = loading.load(settings, "cpu", lambda _: None)
    scheduler = worker._scheduler(settings, loaded, "cpu", lambda _: None)
    assert scheduler.budget.on_change is address_space.promised


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 1 << 20, "intermediate_size": 1 << 24},
        {"vocab_size": 1 << 24},
        {"n_groups": 1 << 40},
    ],
    ids=str,
)
def test_attack_a_config_that_builds_more_than_the_weights(
    odd: Callable[..., WorkerSettings], values: dict[str, Any]
) -> None:
    with pytest.raises((ModelCorrupt, OutOfMemory)):
        loading.load(odd(**values), "cpu", lambda _: None)


@linux
@pytest.mark.usefixtures("cpu_installed")
def test_attack_what_a_build_takes_beyond_its_weights_is_corrupt(
    odd: Callable[..., WorkerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(path: Path, config: dict[str, Any]) -> Any:
        return bytearray(limits.BUILD_BYTES + 8 * GIB)

    for module in (model_reading, stage_loading):
        monkeypatch.setattr(module, "lazy_model", greedy)
    with pytest.raises(ModelCorrupt, match="its weights take"):
        loading.load(odd(), "cpu", lambda _: None)
    with pytest.raises(ModelCorrupt, match="its weights take"):
        stage_loading.load_stage(odd(), "cpu", lambda _: None, first=0, last=1)
