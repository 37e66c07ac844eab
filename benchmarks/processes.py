"""Processes of a benchmark: what they have used of the processor, and that none of them outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG = 1


def processor(pid: int) -> float:
    """Processor seconds so far of a process, its threads and its children, those that have ended included."""
    stat = times(pid)
    if stat is None:
        raise RuntimeError(f"process {pid} is gone")
    return sum(stat) + sum(_family(int(child)) for child in children(pid))


def times(pid: int) -> tuple[float, ...] | None:
    """User, system, ended children's user and ended children's system seconds; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return tuple(int(field) / TICKS for field in fields[11:15])


def exact(pid: int) -> float:
    """Processor seconds of a process with one thread, to the nanosecond where the kernel tells."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        stat = times(pid)
        return 0.0 if stat is None else sum(stat)


def children(pid: int) -> list[str]:
    """The processes that it has started, from any of its threads."""
    found: list[str] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += (thread / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended, or one of its threads has.
        pass
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end_with_parent() -> None:
    """For a process that was just forked: a benchmark that is killed leaves neither server nor worker behind."""
    # A server that gets this ends at once; a worker in Python has no handler for it. A shell that starts the benchmark
    # in the background has it ignored, which would be inherited.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


def _family(pid: int) -> float:
    stat = times(pid)
    return 0.0 if stat is None else sum(stat) + sum(_family(int(child)) for child in children(pid))
