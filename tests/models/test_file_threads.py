"""Threads that read models' files: however many of them wait for a disk, nothing else does."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from fleetd.errors import Draining
from fleetd.models.file_threads import FileThreads


class AnsweringDisk:
    """Answers when it is told to. ``asked`` counts who waits for it."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Semaphore(0)
        self.looks = 0

    def look(self) -> str:
        self.looks += 1
        self.asked.release()
        assert self.answers.wait(60)
        return "found"


@pytest.fixture
def disk() -> Iterator[AnsweringDisk]:
    made = AnsweringDisk()
    yield made
    made.answers.set()


async def test_no_more_wait_than_there_are_threads_and_all_get_their_result(disk: AnsweringDisk) -> None:
    threads = FileThreads(2)
    looks = [asyncio.create_task(threads.run(disk.look)) for _ in range(5)]
    for _ in range(2):
        assert await asyncio.to_thread(disk.asked.acquire, timeout=60)
    # Asyncio's own threads are free.
    assert await asyncio.to_thread(lambda: "free") == "free"
    assert disk.looks == 2
    disk.answers.set()
    assert await asyncio.gather(*looks) == ["found"] * 5


async def test_a_thread_that_is_free_is_used_again() -> None:
    threads = FileThreads(2)
    assert len({await threads.run(threading.get_ident) for _ in range(20)}) <= 2


async def test_what_is_given_up_before_its_turn_is_not_done(disk: AnsweringDisk) -> None:
    threads = FileThreads(1)
    first = asyncio.create_task(threads.run(disk.look))
    assert await asyncio.to_thread(disk.asked.acquire, timeout=60)
    second = asyncio.create_task(threads.run(disk.look))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    disk.answers.set()
    assert await first == "found"
    assert await threads.run(lambda: disk.looks) == 1


async def test_what_waits_for_a_disk_is_abandoned(disk: AnsweringDisk) -> None:
    threads = FileThreads(1)
    looks = [asyncio.create_task(threads.run(disk.look)) for _ in range(3)]
    assert await asyncio.to_thread(disk.asked.acquire, timeout=60)
    threads.abandon()
    for error in await asyncio.gather(*looks, return_exceptions=True):
        assert isinstance(error, Draining)
    disk.answers.set()
    # A result that comes too late is nobody's.
    assert await threads.run(lambda: "next") == "next"


async def test_results_errors_arguments_and_context_are_the_callers() -> None:
    threads, variable = FileThreads(1), contextvars.ContextVar("variable", default="")
    variable.set("here")
    assert await threads.run(divmod, 7, 2) == (3, 1)
    assert await threads.run(sorted, [1, 2], reverse=True) == [2, 1]
    assert await threads.run(variable.get) == "here"
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)


@pytest.mark.one_loop
def test_the_process_ends_while_a_thread_waits() -> None:
    code = (
        "import asyncio, threading\n"
        "from fleetd.models import file_threads\n"
        "async def main():\n"
        "    asyncio.create_task(file_threads.look(threading.Event().wait))\n"
        "    await asyncio.sleep(0)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
