"""`make demo`: a throw-away daemon on loopback, the default model, three questions, and the plan that ran.

Needs nothing but what `make` installed. The model is kept in .cache/models for the next time; everything else
lives in a temporary folder and is gone afterwards, also after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
MODEL = "smollm2-135m"
# A text that everybody can check the answers against, some 2,200 tokens long.
LONG_TEXT = REPO / "LICENSE"
# (the question, whether it is about the long text). The third needs little of the second's work again.
QUESTIONS = (
    ("What is the capital of France?", False),
    ("Does this license provide a warranty? Answer in one sentence.", True),
    ("What is the name of this license?", True),
)
READY_S = 30.0
STOP_S = 45.0
PULL_S = 900.0
ANSWER_S = 300.0
# Unix socket paths are limited to about 100 bytes, and some temporary folders are deep.
LONGEST_TMP = 60


def say(text: str = "") -> None:
    print(text, flush=True)


def fail(text: str, log: Path | None = None) -> NoReturn:
    print(f"\ndemo: {text}", file=sys.stderr)
    if log is not None and log.exists():
        print("the daemon's last words:", file=sys.stderr)
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    sys.exit(1)


@contextmanager
def temporary_home() -> Iterator[Path]:
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="fleetd-demo-", dir=base if len(base) <= LONGEST_TMP else "/tmp"))  # noqa: S108
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def daemon(home: Path, environ: dict[str, str]) -> Iterator[Path]:
    """A running daemon; yields the path of its log."""
    log = home / "demo.log"
    command: list[str | Path] = [BIN / "fleetd", "run", "--home", home, "--http", "127.0.0.1:0"]
    with log.open("wb") as out:
        # A session of its own: Ctrl-C on the terminal reaches the demo alone, which then stops it in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, start_new_session=True
        )
    try:
        wait_ready(process, home / "fleetd.sock", log)
        yield log
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            fail(f"the daemon ended with exit status {process.returncode}", log)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                time.sleep(0.05)
            else:
                return
    fail(f"the daemon was not ready within {READY_S:.0f} s", log)


def fleetctl(home: Path, environ: dict[str, str], *arguments: str, limit_s: float, stdin: str = "") -> Any:
    """Run fleetctl with --json. Its progress goes to this terminal; its answer comes back as an object."""
    command: list[str | Path] = [BIN / "fleetctl", "--home", home, *arguments, "--json"]
    # What is piped becomes part of a prompt, so there is a pipe only where there is something to say.
    given: dict[str, Any] = {"input": stdin} if stdin else {"stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environ,
            timeout=limit_s,
            check=False,
            **given,
        )
    except subprocess.TimeoutExpired:
        fail(f"`fleetctl {arguments[0]}` took longer than {limit_s:.0f} s", home / "demo.log")
    if done.returncode:
        fail(f"`fleetctl {arguments[0]}` failed with exit status {done.returncode}", home / "demo.log")
    return json.loads(done.stdout)


def ask(home: Path, environ: dict[str, str], question: str, *, about_text: bool) -> None:
    text = LONG_TEXT.read_text(encoding="utf-8") if about_text else ""
    about = f"  (about {LONG_TEXT.name}, {len(text):,} characters)" if about_text else ""
    say(f"\n> {question}{about}")
    began = time.monotonic()
    answer = fleetctl(
        home,
        environ,
        *("chat", "--model", MODEL, "--temperature", "0", "--max-tokens", "100"),
        *(() if about_text else (question,)),
        limit_s=ANSWER_S,
        # The text first: a second question about it then finds it computed.
        stdin=f"{text}\n{question}\n" if about_text else "",
    )
    took_s = time.monotonic() - began
    if not answer["content"].strip():
        fail("the answer is empty", home / "demo.log")
    say(textwrap.indent(textwrap.fill(answer["content"], 96), "  "))
    usage, times = answer["usage"], answer["timings"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    say(f"  plan       {answer['plan']} · {answer['exactness']}")
    say(
        f"  prompt     {usage['prompt_tokens']:,} tokens, {cached:,} of them known already; "
        f"the others read in {times['prompt_ms'] / 1000:.2f} s"
    )
    say(
        f"  answer     {usage['completion_tokens']} tokens in {times['predicted_ms'] / 1000:.2f} s; "
        f"first one after {answer['first_token_s']:.2f} s, everything after {took_s:.2f} s"
    )


def main() -> None:
    began = time.monotonic()
    # `kill` should clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEETD_")}
    environ["FLEETD_MODELS_DIR"] = str(REPO / ".cache" / "models")
    with temporary_home() as home:
        say(f"starting a throw-away daemon, its home in {home}")
        with daemon(home, environ):
            status = fleetctl(home, environ, "status", limit_s=30)
            machine, http = status["machine"], status["http"]
            say(
                f"ready after {time.monotonic() - began:.1f} s on http://{http['host']}:{http['port']}/v1 · "
                f"{machine['cpu']} · {machine['cores']} cores · {machine['memory_bytes'] / 2**30:.0f} GiB"
            )
            say(f"getting the model {MODEL} (90 MB, once)")
            fleetctl(home, environ, "models", "pull", MODEL, limit_s=PULL_S)
            begun = time.monotonic()
            fleetctl(home, environ, "models", "load", MODEL, limit_s=ANSWER_S)
            say(f"verified and loaded in {time.monotonic() - begun:.1f} s")
            for question, about_text in QUESTIONS:
                ask(home, environ, question, about_text=about_text)
        say(f"\ndaemon stopped, its home removed; {time.monotonic() - began:.0f} s in all")
    say("next: `.venv/bin/fleetd run`, and in another terminal `.venv/bin/fleetctl chat`")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
