"""Which event loop Fairlane's own processes run on."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import subprocess
import sys

import pytest
import uvloop

from fairlane import event_loops
from fairlane.errors import InvalidInput


async def kind() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


@pytest.mark.parametrize("wanted", ["", "auto", "uvloop"])
def test_uvloop_is_taken_when_it_is_installed(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(event_loops.LOOP, wanted)

    assert issubclass(event_loops.run(kind()), uvloop.Loop)


def test_asyncio_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(event_loops.LOOP, "asyncio")

    assert not issubclass(event_loops.run(kind()), uvloop.Loop)


def test_without_uvloop_it_is_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(event_loops.LOOP, raising=False)
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert not issubclass(event_loops.run(kind()), uvloop.Loop)


def test_a_requested_event_loop_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(event_loops.LOOP, "uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)

    with pytest.raises(InvalidInput, match=r"FAIRLANE_LOOP: uvloop is not installed; pip install"):
        event_loops.new_event_loop()


def test_a_misspelt_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(event_loops.LOOP, "libuv")

    with pytest.raises(InvalidInput, match="FAIRLANE_LOOP: must be auto, asyncio or uvloop, not 'libuv'"):
        event_loops.new_event_loop()


def test_work_that_has_no_loop_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(event_loops.LOOP, "libuv")
    work = kind()

    with pytest.raises(InvalidInput, match="FAIRLANE_LOOP"):
        event_loops.run(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


READER = """
import resource, socket, sys
from fairlane.event_loops import ease_receiving

if sys.argv[1] == "eased":
    ease_receiving()
sender, receiver = socket.socketpair()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        sender.send(b"an answer")
        receiver.recv(256 * 1024)  # as asyncio does
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(5)))
"""
ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "PYTHONMALLOC", "LD_PRELOAD")
"""Variables that change how memory is allocated."""


def page_faults(kind: str) -> int:
    """Page faults of 200 reads in a process of its own: freeing a large block changes an allocator for good."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATOR)}
    command = [sys.executable, "-c", READER, kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=plain).stdout)


def test_answers_are_read_without_fresh_memory_from_the_kernel() -> None:
    # glibc maps fresh pages for each read unless eased: 400 faults. Other allocators have rules of their own, which
    # easing must not make worse. The best of five rounds counts: the system may reclaim pages in any of them.
    glibc = platform.libc_ver()[0] == "glibc"
    assert page_faults("eased") < (20 if glibc else page_faults("not eased") + 20)
