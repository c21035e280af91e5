"""Settings: what exists, what it means, where each value came from.

The section structs below are the table: each field is one key with its type, bounds, default, unit (in the
name) and the reason it exists (its ``Meta`` description). Everything else reads them: the loader, the error
messages, ``fleetd config show`` and the documentation.

Order: defaults < the TOML file < environment (``FLEETD_HTTP_LISTEN``) < flags. An unknown key is an
error with the nearest name, because a misspelt setting that is ignored is worse than a daemon that does not
start.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from fleetd.compression.policy import MIN_PROMPT_TOKENS, SmartPrefillPolicy
from fleetd.control.model_facts import KvBits, WireBits
from fleetd.control.setting_view import SettingView
from fleetd.errors import ConfigError
from fleetd.limits import ANSWER_TOKENS, GIB, KIB, MEMBERS_CONFIGURED, MIB
from fleetd.models.model_names import ModelNames, untagged
from fleetd.text.decoding import from_plain

DEFAULT_PORT = 8114
DEFAULT_PEER_PORT = 8115
# Beyond these a figure is a slip of the pen, and would overflow somewhere less polite.
_FOREVER_S = 10**9
_MOST_BYTES = 1 << 50
# Variables of the FLEETD_ family that are not settings.
_NOT_SETTINGS = frozenset({"FLEETD_HOME"})
# As browsers write it: extensions and desktop programs have schemes of their own.
_WEB_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?")
_WEB_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,31}")
_NEAR_ENOUGH = 0.75  # difflib's own default of 0.6 offers "log.level" for "model"


class HttpSettings(msgspec.Struct, frozen=True):
    listen: Annotated[
        str, Meta(description="HOST:PORT of the OpenAI-compatible API; port 0 picks a free one.")
    ] = f"127.0.0.1:{DEFAULT_PORT}"
    allow_remote: Annotated[
        bool,
        Meta(description="Permits an address other machines can reach. The token is then always required."),
    ] = False
    require_token: Annotated[
        bool,
        Meta(
            description="Clients on TCP must send the token; off, every user of this machine may use the API."
        ),
    ] = True
    allowed_hosts: Annotated[
        list[str],
        Meta(description="Host header values accepted besides the loopback names; stops DNS rebinding."),
    ] = []
    allowed_origins: Annotated[
        list[str], Meta(description="Web origins whose pages may call the API; none by default.")
    ] = []

    ollama_listen: Annotated[
        str,
        Meta(
            description="HOST:PORT of this machine's loopback where the API needs no token, for Ollama's "
            'clients, which look at 127.0.0.1:11434; "" is none. If it is taken, the daemon goes on '
            "without it."
        ),
    ] = ""

    @property
    def host(self) -> str:
        return _split_address(self.listen)[0]

    @property
    def port(self) -> int:
        return _split_address(self.listen)[1]

    @property
    def hosts(self) -> frozenset[str]:
        """``allowed_hosts`` in small letters: a name is the same in either."""
        return frozenset(host.lower() for host in self.allowed_hosts)

    @property
    def ollama_address(self) -> tuple[str, int] | None:
        return _split_address(self.ollama_listen) if self.ollama_listen else None


class ModelSettings(msgspec.Struct, frozen=True):
    dir: Annotated[str, Meta(description='Where pulled models are kept; "" is HOME/models.')] = ""
    default: Annotated[
        str, Meta(description="The model of requests that name none (or `default`).", min_length=1)
    ] = "smollm2-135m"
    large: Annotated[
        str,
        Meta(
            max_length=200,
            description="The model behind the names of other vendors' larger models, which agents ask for "
            '(`claude-opus-…`, `gpt-5…`); "" is the default model.',
        ),
    ] = ""
    small: Annotated[
        str,
        Meta(
            max_length=200,
            description="The same for their smaller models (`claude-haiku-…`, `gpt-5-mini`), which agents "
            'ask for titles and searches; "" is the model of `large`.',
        ),
    ] = ""
    hub_cache: Annotated[
        str,
        Meta(description='Hugging Face cache whose weights are used where they lie; "" is its usual place.'),
    ] = ""

    kv_bits: Annotated[
        list[str],
        Meta(
            description="Models whose keys and values are held quantised, each as NAME=8 or NAME=4 (bits): "
            "a context takes about half or a third of its memory. Answers change, hardly in 8 bits and "
            "clearly in 4."
        ),
    ] = []

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.default, self.large, self.small)

    def kv_bits_of(self, model: str) -> KvBits:
        """Bits of each number of the keys and values of ``model``, by its name here; 0 is as computed."""
        return dict(_split_kv_bits(entry) for entry in self.kv_bits).get(model, 0)


class EngineSettings(msgspec.Struct, frozen=True):
    device: Annotated[
        Literal["auto", "cpu", "gpu"],
        Meta(description="Where models run; auto takes the GPU if there is one."),
    ] = "auto"
    idle_unload_s: Annotated[
        int,
        Meta(
            ge=0, le=_FOREVER_S, description="A model unused for this long gives its memory back; 0 keeps it."
        ),
    ] = 1800
    memory_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=0.95,
            description="Share of the memory the device calls usable that all models together may hold.",
        ),
    ] = 0.85
    max_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=_MOST_BYTES,
            description="The same, of all models together, as an absolute figure; "
            "0 leaves it to memory_fraction.",
        ),
    ] = 0
    overcommit: Annotated[
        bool,
        Meta(
            description="Load models as if all memory were free; the machine may swap, or a load may fail "
            "halfway."
        ),
    ] = False
    wire_weights: Annotated[
        bool,
        Meta(description="On a Mac, keep weights from being paged out; off if that makes it unstable."),
    ] = True
    max_streams: Annotated[
        int, Meta(ge=1, le=1024, description="Answers decoded at once per model; more of them wait.")
    ] = 16
    prefill_chunk_tokens: Annotated[
        int, Meta(ge=0, le=65536, description="Prompt tokens per step; 0 chooses by device.")
    ] = 0
    prefix_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=_MOST_BYTES,
            description="RAM for prompts seen before, of each model; 0 chooses by memory. "
            "At most three quarters of what its weights leave.",
        ),
    ] = 0
    answer_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=ANSWER_TOKENS,
            description="Most tokens of an answer whose request names no max_tokens; 0 fills the context.",
        ),
    ] = 32_768
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="CPU threads of an engine worker; 0 means all cores.")
    ] = 0
    cpu_arithmetic: Annotated[
        Literal["auto", "float32", "int8"],
        Meta(
            description="How a CPU multiplies by weights: float32 unpacks them at load, int8 keeps them "
            "packed and rounds activations to 8 bits. auto is int8 for quantised weights, and for others "
            "that would not fit into memory as float32."
        ),
    ] = "auto"


class FleetSettings(msgspec.Struct, frozen=True):
    enabled: Annotated[
        bool, Meta(description="Off, this machine opens no port for others and looks for none.")
    ] = True
    listen: Annotated[
        str,
        Meta(
            description="HOST:PORT for other machines; * is every interface, port 0 picks a free one. "
            "Only paired machines get past the TLS handshake."
        ),
    ] = f"*:{DEFAULT_PEER_PORT}"
    name: Annotated[
        str, Meta(max_length=64, description='What people call this machine; "" is its host name.')
    ] = ""
    mdns: Annotated[
        bool,
        Meta(description="Finds and is found on the local network; off, only known addresses are tried."),
    ] = True
    peers: Annotated[
        list[str],
        Meta(
            max_length=MEMBERS_CONFIGURED,
            description="HOST:PORT of machines beyond mDNS: other networks, Tailscale, some Wi-Fi.",
        ),
    ] = []
    local_only: Annotated[
        bool,
        Meta(description="Prompts given to this machine are never sent to another one."),
    ] = False
    exactness: Annotated[
        Literal["exact", "equivalent"],
        Meta(
            description="exact: other machines have a part in an answer only if it then has the bytes that "
            "this machine gives alone; equivalent: also if they round in another order (label "
            "`equivalent`), as a Mac and a Spark do. Requests may say otherwise."
        ),
    ] = "equivalent"
    wire_bits: Annotated[
        Literal[8, 16],
        Meta(
            description="8: helpers send this machine keys and values in 8 bits, about half of the bytes, if "
            "an answer then begins clearly sooner, as over slow links. Such answers are `equivalent`, with "
            "`X-Fleet-Wire-Bits`. 16: as they are computed."
        ),
    ] = 16
    plain_links: Annotated[
        list[str],
        Meta(
            max_length=MEMBERS_CONFIGURED,
            description="Interfaces (bridge0) and networks (10.0.5.0/24) that are private from end to end: "
            "if both machines name the link, the ranks of a divided model use it unsealed.",
        ),
    ] = []
    manage: Annotated[
        bool,
        Meta(
            description="Machines that a person here has confirmed may pull, load, unload, pin and remove "
            "models here (fleetctl models VERB --on MACHINE); off, they are refused."
        ),
    ] = True

    @property
    def host(self) -> str:
        return _split_address(self.listen)[0]

    @property
    def port(self) -> int:
        return _split_address(self.listen)[1]

    @property
    def narrow_bits(self) -> WireBits:
        """``wire_bits`` as planners have it: 0 is as computed."""
        return 8 if self.wire_bits == 8 else 0

    @property
    def static_peers(self) -> list[tuple[str, int]]:
        return [_split_peer(peer) for peer in self.peers]


class LogSettings(msgspec.Struct, frozen=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least important line that is shown."),
    ] = "info"
    format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="auto is console on a terminal and JSON under a service manager."),
    ] = "auto"


class SmartPrefillSettings(msgspec.Struct, frozen=True):
    """What smart prefill does where a request leaves it open (``compression.policy.SmartPrefillPolicy``)."""

    enabled: Annotated[
        bool,
        Meta(description="Also shortens prompts that do not ask for it; lossy, so off unless you say so."),
    ] = False
    compressor_model: Annotated[
        str,
        Meta(max_length=200, description='The model that scores; "" is the cheapest that finds enough.'),
    ] = ""
    target_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of the tokens to keep; 0 keeps as many as the scores call for."),
    ] = 0.0
    min_keep_tokens: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="At least so many tokens are kept.")
    ] = 0
    max_keep_tokens: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="At most so many are kept; 0 sets no bound.")
    ] = 0
    min_prompt_tokens: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="Shorter prompts are read whole: scoring costs about that.")
    ] = MIN_PROMPT_TOKENS
    preserve_boundaries: Annotated[
        bool, Meta(description="Only whole paragraphs, statements, values and table rows are left out.")
    ] = True
    mode: Annotated[
        Literal["text", "sparse", "auto"],
        Meta(description="text rewrites the prompt, sparse keeps tokens at their places, auto chooses."),
    ] = "auto"

    @property
    def policy(self) -> SmartPrefillPolicy:
        return SmartPrefillPolicy(**msgspec.structs.asdict(self))


class SpeculationSettings(msgspec.Struct, frozen=True):
    """Drafts, which an answer's own model verifies: they change how soon it comes, and nothing of it."""

    mode: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="When drafts are verified: auto if it saves time, on always, off never."),
    ] = "auto"
    draft_model: Annotated[
        str,
        Meta(
            max_length=200,
            description="A small model of the same family that drafts for larger ones, or a drafter for "
            'the hidden states of one (DFlash, DSpark, an assistant of Gemma 4); "" is none.',
        ),
    ] = ""
    draft_on: Annotated[
        Literal["auto", "here", "peers"],
        Meta(description="Where it drafts; auto prefers another machine that has it loaded and is idle."),
    ] = "auto"


class PowerSettings(msgspec.Struct, frozen=True):
    keep_awake: Annotated[
        bool,
        Meta(description="While this machine computes for anybody, it does not sleep for lack of use."),
    ] = True
    least_battery: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Below this charge the machine may sleep even while it computes; 1 is always.",
        ),
    ] = 0.3
    wake: Annotated[
        bool,
        Meta(
            description="Wakes a paired machine that sleeps (Wake on LAN) if its answer still comes "
            "first, and lets others wake this one."
        ),
    ] = True


class CacheSettings(msgspec.Struct, frozen=True):
    disk: Annotated[
        bool,
        Meta(
            description="Keeps what was computed of prompts on the disk, sealed, so that none is read twice; "
            "off throws away what is there."
        ),
    ] = True
    dir: Annotated[
        str,
        Meta(description='Where; "" is HOME/cache/kv. The key stays in HOME/identity.'),
    ] = ""
    quota_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=_MOST_BYTES,
            description="Room for it; 0 is a tenth of the free disk, and no more than 34 GB.",
        ),
    ] = 0


class UsageSettings(msgspec.Struct, frozen=True):
    keep_days: Annotated[
        int, Meta(ge=1, le=36500, description="Usage rows older than this are deleted; they hold no text.")
    ] = 365


class Config(msgspec.Struct, frozen=True):
    """All settings, and for each key where its value came from."""

    http: HttpSettings = HttpSettings()
    models: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    fleet: FleetSettings = FleetSettings()
    log: LogSettings = LogSettings()
    power: PowerSettings = PowerSettings()
    cache: CacheSettings = CacheSettings()
    usage: UsageSettings = UsageSettings()
    smart_prefill: SmartPrefillSettings = SmartPrefillSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    origins: dict[str, str] = {}

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")

    def value(self, key: str) -> Any:
        """The value of ``"section.name"``."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)


# What people call the types of values; others are choices.
_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "string",
    list[str]: "list of strings",
}


class SettingKey(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str  # "http.listen"
    type: Any
    default: Any
    why: str

    @property
    def env(self) -> str:
        return "FLEETD_" + self.name.replace(".", "_").upper()

    @property
    def bare_type(self) -> Any:
        """The type without its bounds."""
        return get_args(self.type)[0]

    @property
    def kind(self) -> str:
        """The type in a word or two, for people."""
        if self.name.endswith("_bytes"):
            return "bytes"
        return _WORDS.get(self.bare_type) or "|".join(map(str, get_args(self.bare_type)))


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "http": HttpSettings,
    "models": ModelSettings,
    "engine": EngineSettings,
    "fleet": FleetSettings,
    "log": LogSettings,
    "power": PowerSettings,
    "cache": CacheSettings,
    "usage": UsageSettings,
    "smart_prefill": SmartPrefillSettings,
    "speculation": SpeculationSettings,
}


def _table() -> dict[str, SettingKey]:
    table = {}
    for section, struct in _SECTIONS.items():
        hints = get_type_hints(struct, include_extras=True)
        defaults = struct()
        for field in msgspec.structs.fields(struct):
            annotated = hints[field.name]
            why = next(m.description for m in annotated.__metadata__ if isinstance(m, Meta) and m.description)
            name = f"{section}.{field.name}"
            table[name] = SettingKey(name, annotated, getattr(defaults, field.name), why)
    return table


KEYS: dict[str, SettingKey] = _table()
# The page may change these. None of them opens the machine to others or turns a check off.
EDITABLE = (
    "models.default",
    "engine.idle_unload_s",
    "engine.memory_fraction",
    "fleet.name",
    "fleet.local_only",
    "smart_prefill.enabled",
    "speculation.mode",
    "cache.disk",
    "cache.quota_bytes",
    "power.keep_awake",
)


def setting_views(settings: Config) -> list[SettingView]:
    """Every setting: its value, where that came from, and what it is for."""
    return [
        SettingView(
            key=key.name,
            value=settings.value(key.name),
            default=key.default,
            origin=settings.origin(key.name),
            type=key.kind,
            env=key.env,
            why=key.why,
            editable=key.name in EDITABLE,
        )
        for key in KEYS.values()
    ]


def load(
    file: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, tuple[str, Any]] | None = None,
    required: bool = False,
) -> Config:
    """Merge the four layers.

    Args:
        file: the TOML file; it may be absent unless ``required``.
        flags: key → (the flag's name, its value), only those given.

    Raises:
        ConfigError: names the source (with the line for a file), the key, and the nearest valid name.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(key: str, value: Any, origin: str) -> None:
        values[key] = _convert(KEYS[key], value, origin, strict=False)
        origins[key] = origin

    for key, value, origin in _from_environment(environ):
        take(key, value, origin)
    for key, (flag, value) in (flags or {}).items():
        take(key, value, f"flag {flag}")
    return of_text(
        read_text(file, required=required), file, {key: (values[key], origins[key]) for key in values}
    )


def overrides(settings: Config) -> dict[str, tuple[Any, str]]:
    """What the environment and flags said, which wins over the file: key → (value, origin)."""
    return {
        key: (settings.value(key), origin)
        for key, origin in settings.origins.items()
        if origin.startswith(("flag ", "environment "))
    }


def of_text(text: str, file: Path, stronger: Mapping[str, tuple[Any, str]]) -> Config:
    """The settings that the text of ``file`` makes with the ``stronger`` ones: key → (value, origin).

    Raises ConfigError.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value, origin in _from_text(text, file):
        values[key] = _convert(KEYS[key], value, origin, strict=True)
        origins[key] = origin
    for key, (value, origin) in stronger.items():
        values[key], origins[key] = value, origin
    sections = {
        section: struct(
            **{
                name.partition(".")[2]: value
                for name, value in values.items()
                if name.partition(".")[0] == section
            }
        )
        for section, struct in _SECTIONS.items()
    }
    config = Config(**sections, origins=origins)  # type: ignore[arg-type]  # each section by its own struct
    _check(config)
    return config


def read_text(file: Path, *, required: bool = False) -> str:
    """The settings file as text; "" if there is none. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise ConfigError(
                f"The settings file {file} does not exist.", hint="Check the path given with --config."
            ) from None
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {file} cannot be read: {error}.") from error


def _from_text(text: str, file: Path) -> list[tuple[str, Any, str]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"The settings file {file} is not valid TOML: {error}.", hint="Correct that line."
        ) from error
    except RecursionError:  # nesting has no bound in TOML, and none here would be a setting
        raise ConfigError(
            f"The settings file {file} is not valid TOML for settings: it is nested too deeply.",
            hint="Settings are one section deep.",
        ) from None
    found = []
    for section, body in document.items():
        where = f"{file}, line {_line_of(text, section, None)}"
        if section not in _SECTIONS:
            raise _unknown(section, where, list(_SECTIONS), list(KEYS))
        if not isinstance(body, dict):
            raise ConfigError(
                f"`{section}` in {where} must be a section, not a value.", hint=f"Write [{section}]."
            )
        for name, value in body.items():
            where = f"{file}, line {_line_of(text, section, name)}"
            if f"{section}.{name}" not in KEYS:
                raise _unknown(f"{section}.{name}", where, list(KEYS))
            found.append((f"{section}.{name}", value, where))
    return found


def _line_of(text: str, section: str, name: str | None) -> int:
    """The line a key stands on. A reader's aid: exotic spellings of a key give its section's line, or 1."""
    section_line, here = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
            here = header[1].strip("\"'")
            if here == section:
                section_line = number
        elif entry := re.match(r"\s*([\w\".'-]+)\s*=", line):
            spelled = re.sub(r"[\"'\s]", "", entry[1])
            full = f"{here}.{spelled}" if here else spelled
            if full == (f"{section}.{name}" if name else section):
                return number
            if not here and full.startswith(f"{section}."):
                section_line = number
    return section_line


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    by_env = {key.env: key for key in KEYS.values()}
    prefixes = tuple(f"FLEETD_{section.upper()}_" for section in _SECTIONS)
    found = []
    for variable, value in environ.items():
        if not variable.startswith("FLEETD_") or variable in _NOT_SETTINGS:
            continue
        if key := by_env.get(variable):
            found.append((key.name, value, f"environment {variable}"))
        elif variable.startswith(prefixes) or difflib.get_close_matches(variable, by_env, 1, 0.9):
            # Other FLEETD_ names may belong to other programs; these can only be meant for us.
            raise _unknown(variable, "the environment", list(by_env))
    return found


def _convert(key: SettingKey, value: Any, where: str, *, strict: bool) -> Any:
    if not strict and isinstance(value, str):
        if key.bare_type == list[str]:
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif key.bare_type is bool:
            value = {"1": True, "true": True, "yes": True, "on": True}.get(value.lower(), value)
            value = {"0": False, "false": False, "no": False, "off": False}.get(str(value).lower(), value)
    if key.kind == "bytes" and isinstance(value, str):
        value = _bytes(value)
    try:
        return from_plain(value, key.type, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"`{key.name}` from {where} has a value that cannot be used ({value!r}): "
            f"{str(error)[:1].lower()}{str(error)[1:]}.",
            hint=f"Type: {key.kind}; default: {key.default!r}. {key.why}",
            param=key.name,
        ) from None


def _bytes(text: str) -> int | str:
    """8GB, 8 GiB and 8589934592 in bytes; anything else unchanged, for the type check to refuse."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    number, unit, binary = match.groups()
    scale = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": GIB << 10}[(unit or "").upper()]
    if unit and not binary:
        scale = 1000 ** (" KMGT".index(unit.upper()))
    return int(float(number) * scale)


def _unknown(name: str, where: str, *vocabularies: list[str]) -> ConfigError:
    for valid in vocabularies:
        near = difflib.get_close_matches(name, valid, 1, _NEAR_ENOUGH)
        if not near:
            # A key typed without its section ("listen") is looked for by its last part; several have it.
            tails = {option.rpartition(".")[2] for option in valid}
            tail = difflib.get_close_matches(name.rpartition(".")[2], tails, 1)
            near = [option for option in valid if tail and option.rpartition(".")[2] == tail[0]]
        if near:
            hint = f"Did you mean {' or '.join(f'`{option}`' for option in near)}?"
            break
    else:
        hint = "`fleetd config show` lists all settings."
    return ConfigError(f"Unknown setting `{name}` in {where}.", hint=hint, param=name)


def _split_kv_bits(entry: str) -> tuple[str, KvBits]:
    """Raises ValueError for anything but NAME=8, NAME=4, or NAME=16 for as they are computed."""
    name, _, bits = entry.rpartition("=")
    known: dict[str, KvBits] = {"16": 0, "8": 8, "4": 4}
    if not name.strip() or bits.strip() not in known:
        raise ValueError(entry)
    return untagged(name.strip()), known[bits.strip()]


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(address)
    return host, int(port)


def _split_peer(address: str) -> tuple[str, int]:
    """HOST or HOST:PORT; an IPv6 address with a port stands in brackets."""
    with suppress(ValueError):
        return str(ipaddress.IPv6Address(address)), DEFAULT_PEER_PORT
    if ":" not in address or address.endswith("]"):
        address = f"{address}:{DEFAULT_PEER_PORT}"
    host, port = _split_address(address)
    if ":" in host:
        ipaddress.IPv6Address(host)
    return host, port


def _check_fleet(config: Config) -> None:
    where = config.origin("fleet.listen")
    try:
        host, _ = _split_address(config.fleet.listen)
        if host not in ("*", "localhost"):
            ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"`fleet.listen` from {where} is not an address: {config.fleet.listen!r}.",
            hint=f"Write HOST:PORT with an address of this machine, or *:{DEFAULT_PEER_PORT} for all.",
            param="fleet.listen",
        ) from None
    for peer in config.fleet.peers:
        try:
            _split_peer(peer)
        except ValueError:
            origin = config.origin("fleet.peers")
            raise ConfigError(
                f"`fleet.peers` from {origin} holds {peer!r}, which is not HOST or HOST:PORT.",
                hint=f"The port is {DEFAULT_PEER_PORT} unless that machine's fleet.listen says otherwise.",
                param="fleet.peers",
            ) from None


def _check_plain_links(config: Config) -> None:
    for declared in config.fleet.plain_links:
        if why := _not_private(declared):
            raise ConfigError(
                f"`fleet.plain_links` from {config.origin('fleet.plain_links')} holds {declared!r}, which "
                f"{why}.",
                hint="Name an interface of this machine (bridge0), or a private network (10.0.5.0/24).",
                param="fleet.plain_links",
            )


def _not_private(declared: str) -> str:
    """Why this is no link that can be declared private, as the end of a sentence; "" if it is one."""
    if "/" not in declared:
        return "" if _INTERFACE.fullmatch(declared) else "is neither an interface nor a network"
    try:
        network = ipaddress.ip_network(declared, strict=False)
    except ValueError:
        return "is neither an interface nor a network"
    return "" if network.is_private or network.is_link_local else "has addresses of the internet"


def _is_loopback(address: str) -> bool:
    """Raises ValueError if it is no HOST:PORT."""
    host, _ = _split_address(address)
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def _check_ollama(config: Config) -> None:
    address = config.http.ollama_listen
    try:
        if not address or _is_loopback(address):
            return
    except ValueError:
        pass
    raise ConfigError(
        f"`http.ollama_listen` from {config.origin('http.ollama_listen')} is {address!r}, which is no "
        "address of this machine's loopback.",
        hint="Write 127.0.0.1:11434: nothing that needs no token listens on the network.",
        param="http.ollama_listen",
    )


def _check_origins(config: Config) -> None:
    """What is no origin never equals one, and the page that was meant would be refused without a reason."""
    for origin in config.http.allowed_origins:
        if not _WEB_ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"`http.allowed_origins` from {config.origin('http.allowed_origins')} holds {origin!r}, "
                "which is no web origin.",
                hint="Write SCHEME://HOST or SCHEME://HOST:PORT in small letters, without a path; commas "
                "separate several in the environment.",
                param="http.allowed_origins",
            )


def _check_hosts(config: Config) -> None:
    """An address with a scheme or a path is no Host that a client sends; as ``_check_origins``."""
    for host in config.http.allowed_hosts:
        if not _WEB_HOST.fullmatch(host):
            raise ConfigError(
                f"`http.allowed_hosts` from {config.origin('http.allowed_hosts')} holds {host!r}, which is "
                "no Host header.",
                hint="Write HOST:PORT, or HOST for port 80; commas separate several in the environment.",
                param="http.allowed_hosts",
            )


def _check_kv_bits(config: Config) -> None:
    for entry in config.models.kv_bits:
        try:
            _split_kv_bits(entry)
        except ValueError:
            raise ConfigError(
                f"`models.kv_bits` from {config.origin('models.kv_bits')} holds {entry!r}, which is not "
                "NAME=8 or NAME=4.",
                hint="Write for example qwen3-8b=8; `fleetctl models` lists the names.",
                param="models.kv_bits",
            ) from None


def _check_wire_bits(config: Config) -> None:
    if config.fleet.narrow_bits and config.fleet.exactness == "exact":
        raise ConfigError(
            f"`fleet.wire_bits` from {config.origin('fleet.wire_bits')} is 8, which rounds what helpers "
            f"send, and `fleet.exactness` from {config.origin('fleet.exactness')} is exact.",
            hint="Leave one of them out. A request may still ask for `exactness: exact`.",
            param="fleet.wire_bits",
        )


def _check(config: Config) -> None:
    """What concerns more than one value, and the one promise that no setting may break by accident."""
    _check_fleet(config)
    _check_plain_links(config)
    _check_ollama(config)
    _check_origins(config)
    _check_hosts(config)
    _check_kv_bits(config)
    _check_wire_bits(config)
    where = config.origin("http.listen")
    try:
        loopback = _is_loopback(config.http.listen)
    except ValueError:
        raise ConfigError(
            f"`http.listen` from {where} is not an address: {config.http.listen!r}.",
            hint=f"Write HOST:PORT with an IP address or localhost, for example 127.0.0.1:{DEFAULT_PORT}.",
            param="http.listen",
        ) from None
    if loopback:
        return
    if not config.http.allow_remote:
        raise ConfigError(
            f"`http.listen` from {where} is {config.http.listen}, which other machines can reach.",
            hint="Listen on 127.0.0.1, or set http.allow_remote = true; the token is then the only guard, "
            "and prompts travel unencrypted.",
            param="http.listen",
        )
    if not config.http.require_token:
        raise ConfigError(
            f"`http.require_token` from {config.origin('http.require_token')} is false while "
            f"{config.http.listen} can be reached by other machines.",
            hint="Nothing unauthenticated listens on the network: require the token, or listen on 127.0.0.1.",
            param="http.require_token",
        )
