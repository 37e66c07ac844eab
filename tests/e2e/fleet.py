"""Real processes of a deployment: started, signalled, killed and paused by their ids, and gone when the test ends.

A process is ready when the store knows its session, never after some time. What processes print goes to files, which
are shown when a test fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fairlane.model.intervals import Intervals
from tests.forks import Fork

ROOT = Path(__file__).parent.parent.parent
LEAST_SHOWN = 4_000
QUICK = Intervals(
    heartbeat=0.5,
    lease=4.0,
    poll=0.5,
    rescue=0.3,
    promote=0.3,
    admit=0.3,
    schedule=0.5,
    prune=1.0,
    leader_lease=2.0,
    leader_renew=0.5,
    stand=0.3,
    caution=1.0,
    clock_slack=2.0,
    trust_margin=0.3,
)
"""The usual proportions, shrunk, but long enough that no process looks dead on a busy machine."""


class Process:
    """One started process and its descendants."""

    def __init__(
        self, name: str, program: Sequence[str], environment: dict[str, str], output: Path, *, fork: bool = True
    ) -> None:
        """`program` is a module and its arguments. Without `fork` it is an interpreter of its own from the start."""
        self.name = name
        self.output = output
        output.touch()
        self._popen = (_fork if fork else _interpreter)(program, environment, output)
        self.pid = self._popen.pid

    @property
    def ended(self) -> int | None:
        """Its exit code, None while it runs; negative when a signal ended it."""
        return self._popen.poll()

    def family(self) -> list[int]:
        """Its descendants. They stay in its session when it dies, and so are found even then."""
        return descendants(self.pid)

    def stop(self) -> None:
        """Request its end by SIGTERM, as an operator does."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it. Its descendants have to detect that."""
        self._send(signal.SIGKILL)

    def pause(self) -> None:
        """Suspend it."""
        self._send(signal.SIGSTOP)

    def proceed(self) -> None:
        """Continue it."""
        self._send(signal.SIGCONT)

    def wait(self) -> None:
        """Wait until it has ended."""
        self._popen.wait()

    def cpu_seconds(self) -> float:
        """Processor time used so far, by all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _send(self, number: signal.Signals) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)


def _fork(program: Sequence[str], environment: dict[str, str], output: Path) -> Fork:
    return Fork(program[0], program[1:], env=environment, output=output)


def _interpreter(program: Sequence[str], environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Fleet:
    """All processes of one deployment."""

    def __init__(self, directory: Path, url: str, ledger: Path, intervals: Intervals) -> None:
        self._directory = directory
        self._processes: list[Process] = []
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("FAIRLANE", "PYTHONDONTWRITE"))}
        self._environment |= {"FAIRLANE_URL": url, "LEDGER": str(ledger)}
        self._environment |= {f"FAIRLANE_{f.upper()}": str(getattr(intervals, f)) for f in intervals.__struct_fields__}

    def worker(
        self,
        *options: str,
        app: str = "tests.e2e.tasks:app",
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        fork: bool = True,
    ) -> Process:
        """Start ``fairlane worker`` with an application, usually the one under test."""
        return self._start(name, ["fairlane", "worker", "-A", app, *options], env, fork=fork)

    def manager(self, *, name: str | None = None, env: Mapping[str, str] | None = None) -> Process:
        """Start ``fairlane manager``."""
        return self._start(name, ["fairlane", "manager"], env)

    def program(
        self, module: str, *arguments: str, name: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a program of the tests."""
        return self._start(name, [module, *arguments], env)

    def instance(
        self,
        web: str = "tests.e2e.web:web",
        *,
        port: int = 0,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a complete instance under uvicorn, usually on a free port that is read from its log."""
        return self.program("uvicorn", web, "--port", str(port), name=name, env=env)

    def close(self) -> None:
        """End every process that is left."""
        end_families(self._processes)

    def reports(self) -> Iterator[str]:
        """The end of the output of every process."""
        for process in self._processes:
            text = process.output.read_text(errors="replace")[-LEAST_SHOWN:]
            yield f"--- {process.name}, pid {process.pid}, ended {process.ended}\n{text}"

    def _start(
        self, name: str | None, program: list[str], env: Mapping[str, str] | None, *, fork: bool = True
    ) -> Process:
        name = name or f"p{len(self._processes)}"
        environment = self._environment | {"E2E_PROCESS": name} | dict(env or {})
        output = self._directory / f"{len(self._processes)}-{name}.log"
        process = Process(name, program, environment, output, fork=fork)
        self._processes.append(process)
        return process


def end_families(processes: Sequence[Process]) -> None:
    """End processes and their descendants."""
    families = descendants(*(process.pid for process in processes))
    for process in processes:
        process.kill()
    for pid in families:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def is_within(pid: int, process: Process) -> bool:
    """Whether a process id is the process or a descendant of it."""
    try:
        return process.pid in (pid, os.getsid(pid))
    except ProcessLookupError:
        return False  # it has just ended


def descendants(*pids: int) -> list[int]:
    """The descendants of some processes, dead or alive, each of which has begun a session of its own."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    everybody = {number: _kin(number) for number in numbers}
    found = set(pids)
    while more := {pid for pid, kin in everybody.items() if pid not in found and not found.isdisjoint(kin)}:
        found |= more
    return sorted(found.difference(pids))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kin(pid: int) -> tuple[int, int]:
    """The parent of a process, and the first of its session."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - it is read hundreds of times
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0, 0  # it has just ended
    return int(fields[1]), int(fields[3])
