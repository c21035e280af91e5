"""Write docs/settings.md from the table in fleetd/config.py: `python docs/generate_settings.py`."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from fleetd.config import KEYS, SettingKey

PAGE = Path(__file__).with_name("settings.md")

_INTRO = """\
Every setting has a default that is meant to be right. To change one, write it into `fleetd.toml` in the
daemon's home (`fleetctl status` names it), set an environment variable, or give a flag to `fleetd run`:

```toml
[engine]
idle_unload_s = 600
```

Flags win over the environment, the environment over the file, the file over the defaults. `fleetd config
show` prints every value and where it came from. An unknown setting is an error that offers the nearest
name. Sizes may be written as `8GB` or `8GiB`.

The home itself is chosen by `--home` or `FLEETD_HOME`, because the file lies in it."""


_HEAD = "| key | takes | default | environment | meaning |\n|---|---|---|---|---|"


def page() -> str:
    """The whole page."""
    parts = [
        "<!-- Written by docs/generate_settings.py; a test fails when it is out of date. -->",
        "# Settings",
        _INTRO,
    ]
    for section, keys in groupby(KEYS.values(), lambda key: key.name.partition(".")[0]):
        rows = "\n".join(map(_row, keys))
        parts.append(f"## [{section}]\n\n{_HEAD}\n{rows}")
    return "\n\n".join(parts) + "\n"


def _row(key: SettingKey) -> str:
    kind = key.kind.replace("|", " or ")
    meaning = key.why.replace("|", "\\|")
    default = json.dumps(key.default)
    return f"| `{key.name.partition('.')[2]}` | {kind} | `{default}` | `{key.env}` | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
