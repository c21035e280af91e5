"""Settings: order of the layers, and errors that say what to change."""

from __future__ import annotations

import ipaddress
import tempfile
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetd import config
from fleetd.errors import ConfigError


def load(tmp_path: Path, toml: str = "", env: dict[str, str] | None = None, **flags: str) -> config.Config:
    file = tmp_path / "fleetd.toml"
    file.write_text(toml)
    given = {key.replace("__", "."): (f"--{key}", value) for key, value in flags.items()}
    return config.load(file, environ=env or {}, flags=given)


def test_what_a_setting_takes_is_said_in_words() -> None:
    assert {key.kind for key in config.KEYS.values() if "|" not in key.kind} == {
        "true or false",
        "whole number",
        "number",
        "string",
        "list of strings",
        "bytes",
    }
    assert config.KEYS["fleet.wire_bits"].kind == "8|16"


def test_defaults_need_no_file(tmp_path: Path) -> None:
    loaded = config.load(tmp_path / "absent.toml", environ={})
    assert loaded == config.Config()
    assert (loaded.http.host, loaded.http.port) == ("127.0.0.1", 8114)
    assert loaded.origin("http.listen") == "default"


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    toml = '[http]\nlisten = "127.0.0.1:1"\n[log]\nlevel = "error"\n[usage]\nkeep_days = 3\n'
    env = {"FLEETD_HTTP_LISTEN": "127.0.0.1:2", "FLEETD_LOG_LEVEL": "debug"}
    loaded = load(tmp_path, toml, env, http__listen="127.0.0.1:3")
    assert (loaded.http.port, loaded.log.level, loaded.usage.keep_days) == (3, "debug", 3)
    assert loaded.engine.idle_unload_s == 1800
    assert loaded.origin("http.listen") == "flag --http__listen"
    assert loaded.origin("log.level") == "environment FLEETD_LOG_LEVEL"
    assert loaded.origin("usage.keep_days") == f"{tmp_path / 'fleetd.toml'}, line 6"


@pytest.mark.parametrize(
    ("toml", "named", "hint"),
    [
        ("[http]\nlisten_on = 'x'\n", "`http.listen_on`", "http.listen"),
        ("[htpp]\nlisten = 'x'\n", "`htpp`", "`http`"),
        ("[engine]\nidle_unload = 5\n", "`engine.idle_unload`", "engine.idle_unload_s"),
        ("listen = '127.0.0.1:1'\n", "`listen`", "http.listen"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(
    tmp_path: Path, toml: str, named: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml)
    assert named in caught.value.message
    assert hint in caught.value.hint
    assert "line " in caught.value.message


def test_the_line_of_a_bad_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`engine\.idle_unload_s` from .*fleetd\.toml, line 4 .*'soon'"):
        load(tmp_path, '# note\n[engine]\n\nidle_unload_s = "soon"\n')


@pytest.mark.parametrize(
    "toml",
    [
        "[engine]\nmemory_fraction = 0.0\n",
        "[engine]\nmemory_fraction = 0.96\n",
        "[engine]\nmemory_fraction = nan\n",
        "[engine]\nmax_memory_bytes = 99999999999999999999999\n",
        "[engine]\nmax_streams = 0\n",
        "[engine]\nmax_streams = 1025\n",
        "[engine]\nidle_unload_s = -1\n",
        "[usage]\nkeep_days = 0\n",
        "[http]\nrequire_token = 'yes'\n",
        "[log]\nlevel = 'loud'\n",
        "[models]\ndefault = ''\n",
        "http = 3\n",
        "[http\n",
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, toml: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml)
    assert caught.value.hint


@pytest.mark.parametrize("variable", ["FLEETD_HTTP_LISTENS", "FLEETD_ENGINE_NOPE", "FLEETD_HTPP_LISTEN"])
def test_a_misspelt_variable_is_refused(tmp_path: Path, variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load(tmp_path, env={variable: "1"})


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    assert load(tmp_path, env={"FLEETD_HOME": "/x", "FLEETD_UNRELATED_THING": "1"}) == config.Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB", 8_000_000_000),
        ("8 GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("1024", 1024),
        ("1.5G", 1_500_000_000),
    ],
)
def test_sizes_may_be_written_with_units(tmp_path: Path, text: str, expected: int) -> None:
    assert load(tmp_path, env={"FLEETD_ENGINE_MAX_MEMORY_BYTES": text}).engine.max_memory_bytes == expected
    assert load(tmp_path, f'[engine]\nmax_memory_bytes = "{text}"\n').engine.max_memory_bytes == expected


def test_environment_spells_booleans_and_lists(tmp_path: Path) -> None:
    env = {"FLEETD_HTTP_REQUIRE_TOKEN": "off", "FLEETD_HTTP_ALLOWED_HOSTS": "a:1, b:2"}
    loaded = load(tmp_path, env=env)
    assert loaded.http.require_token is False
    assert loaded.http.allowed_hosts == ["a:1", "b:2"]


def test_names_of_hosts_are_the_same_in_capitals(tmp_path: Path) -> None:
    loaded = load(tmp_path, env={"FLEETD_HTTP_ALLOWED_HOSTS": "Studio.local:8114, [FD00::1]:8114, box"})
    assert loaded.http.hosts == {"studio.local:8114", "[fd00::1]:8114", "box"}


@pytest.mark.parametrize("host", ["http://studio.local:8114", "studio.local:8114/v1", "*", "a b", "fd00::1"])
def test_what_is_no_host_is_refused_at_the_start(tmp_path: Path, host: str) -> None:
    """No request would ever have it, and the refusal would ask for what the file already says."""
    with pytest.raises(ConfigError, match="no Host header") as caught:
        load(tmp_path, http__allowed_hosts=host)
    assert caught.value.param == "http.allowed_hosts"


def test_models_whose_keys_and_values_are_quantised(tmp_path: Path) -> None:
    toml = '[models]\nkv_bits = ["qwen3-8b=8", "llama3.3:70b=4", "org/name = 16"]\n'
    models = load(tmp_path, toml).models
    names = ("qwen3-8b", "llama3.3-70b", "org/name", "other")
    assert [models.kv_bits_of(name) for name in names] == [8, 4, 0, 0]
    assert load(tmp_path, models__kv_bits="a=8,b=4").models.kv_bits_of("b") == 4


@pytest.mark.parametrize("entry", ["qwen3-8b", "qwen3-8b=5", "=8", "qwen3-8b=", "8"])
def test_bits_that_there_are_not_are_refused(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match="NAME=8 or NAME=4"):
        load(tmp_path, models__kv_bits=entry)


def test_rows_are_sent_in_8_bits_only_if_nothing_has_to_be_exact(tmp_path: Path) -> None:
    assert load(tmp_path).fleet.narrow_bits == 0
    assert load(tmp_path, fleet__wire_bits="8").fleet.narrow_bits == 8
    assert load(tmp_path, fleet__wire_bits="16", fleet__exactness="exact").fleet.narrow_bits == 0
    with pytest.raises(ConfigError, match=r"fleet\.wire_bits.*fleet\.exactness"):
        load(tmp_path, fleet__wire_bits="8", fleet__exactness="exact")
    with pytest.raises(ConfigError, match=r"fleet\.wire_bits"):
        load(tmp_path, fleet__wire_bits="4")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:8114", "[::1]:8114", "127.8.8.8:1"])
def test_loopback_addresses_are_accepted(tmp_path: Path, listen: str) -> None:
    assert load(tmp_path, http__listen=listen).http.listen == listen


@pytest.mark.parametrize(
    "listen", ["", "8114", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "example.org:80"]
)
def test_what_is_no_address_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.listen"):
        load(tmp_path, http__listen=listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:8114", "192.168.1.4:8114", "[::]:8114", "[fe80::1]:8114"])
def test_open_port_by_accident_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match="other machines can reach"):
        load(tmp_path, http__listen=listen)


def test_open_port_without_token_is_refused_even_when_asked_for(tmp_path: Path) -> None:
    toml = '[http]\nlisten = "0.0.0.0:8114"\nallow_remote = true\n'
    assert load(tmp_path, toml).http.host == "0.0.0.0"  # noqa: S104  (asked for, and guarded by the token)
    with pytest.raises(ConfigError, match=r"http\.require_token"):
        load(tmp_path, toml + "require_token = false\n")


@pytest.mark.parametrize(
    "value",
    [
        '["https://a.example"]',
        "*",
        "null",
        "a.example",
        "https://a.example/",
        "https://A.example",
        "https://a b",
    ],
)
def test_what_is_no_list_of_origins_is_refused_at_the_start(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="is no web origin") as caught:
        load(tmp_path, env={"FLEETD_HTTP_ALLOWED_ORIGINS": value})
    assert caught.value.param == "http.allowed_origins"
    assert "environment FLEETD_HTTP_ALLOWED_ORIGINS" in str(caught.value)


def test_origins_of_sites_extensions_and_desktop_programs_may_be_listed(tmp_path: Path) -> None:
    origins = ["https://a.example", "http://[::1]:3000", "http://localhost:5173", "app://obsidian.md"]
    loaded = load(tmp_path, env={"FLEETD_HTTP_ALLOWED_ORIGINS": ", ".join(origins)})
    assert loaded.http.allowed_origins == origins


@pytest.mark.parametrize("listen", ["0.0.0.0:11434", "192.168.1.4:11434", "[::]:11434", "*:11434", "11434"])
def test_nothing_without_a_token_listens_on_the_network(tmp_path: Path, listen: str) -> None:
    assert load(tmp_path).http.ollama_address is None
    assert load(tmp_path, http__ollama_listen="localhost:11434").http.ollama_address == ("localhost", 11434)
    with pytest.raises(ConfigError, match="no address of this machine's loopback") as caught:
        load(tmp_path, "[http]\nallow_remote = true\n", http__ollama_listen=listen)
    assert caught.value.param == "http.ollama_listen"


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / "nope.toml", environ={}, required=True)


def test_every_key_says_why_it_exists() -> None:
    assert len(config.KEYS) > 15
    for key in config.KEYS.values():
        assert len(key.why) > 20, key.name
        assert key.kind
        assert key.env.startswith("FLEETD_")
    assert len({key.env for key in config.KEYS.values()}) == len(config.KEYS)


_NAMES = st.sampled_from(
    [*(key.name for key in config.KEYS.values()), "http", "engine", "x", "log.x.y", '"a.b"']
)
_VALUES = st.sampled_from(
    [
        "1",
        "-1",
        "nan",
        "inf",
        "0.5",
        "true",
        '""',
        "'8 GiB'",
        "[]",
        "[1]",
        "{a=1}",
        "1979-05-27",
        "9" * 40,
        "[[[[",
    ]
)
_LINES = st.one_of(
    st.builds("{} = {}".format, _NAMES, _VALUES), st.builds("[{}]".format, _NAMES), st.text(max_size=20)
)


@examples(300)
@given(st.lists(_LINES, max_size=6))
def test_no_file_breaks_the_loader(lines: list[str]) -> None:
    """Any text is either a configuration that keeps its promises, or a ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "f.toml"
        file.write_text("\n".join(lines), encoding="utf-8", errors="replace")
        try:
            loaded = config.load(file, environ={})
        except ConfigError:
            return
    assert 0 < loaded.engine.memory_fraction <= 0.95
    assert ipaddress.ip_address(loaded.http.host).is_loopback


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path, "x = " + "[" * 100_000)
