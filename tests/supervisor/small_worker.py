"""A small worker for a supervisor: ``python -m tests.supervisor.small_worker URL FOLDER SLOTS HEARTBEAT LEASE``.

It claims as much as it has slots for and finishes nothing. What it does with a job is the name of the job's task:
``begin`` marks it as begun, ``hold`` does not, ``busy`` holds the interpreter for some seconds, ``die`` ends the
process, ``stubborn`` begins and then ignores every signal.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from itertools import count
from pathlib import Path

from fairlane import open_store
from fairlane.model.ids import new_id
from fairlane.model.job import Claimed, Held, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Reserved, Slots
from fairlane.store.port import Store
from fairlane.supervisor.parent_pipe import supervised

BUSY_SECONDS = 6


class SmallWorker:
    """One session and what it holds."""

    def __init__(self, store: Store, folder: Path, slots: int) -> None:
        given = supervised(os.environ)
        assert given is not None
        self.crash_state, self.parent_pipe = given
        self.store = store
        self.folder = folder
        self.slots = slots
        self.session = new_id()
        self.held: list[Held] = []
        self.claim = 0
        self.signals = 0
        self.over = asyncio.Event()

    async def enter(self, lease: float) -> None:
        self.crash_state.session(self.session)
        slots = Slots(total=self.slots, reserved=Reserved())
        await self.store.register(
            NewSession(
                id=self.session, kind=SessionKind.WORKER, lease=lease, pid=os.getpid(), queues=("default",), slots=slots
            )
        )
        self.crash_state.beat()

    async def renew(self, heartbeat: float) -> None:
        while True:
            await self.store.renew(self.session, self.held, claim=self.claim)
            self.crash_state.beat()
            await asyncio.sleep(heartbeat)

    async def work(self) -> None:
        for number in count(1):
            room = self.slots - len(self.held)
            asks = tuple(Ask("default", priority, room) for priority in Priority)
            for job in await self.store.claim(self.session, Claim(number=number, asks=asks, total=room)):
                self.held.append(job.held)
                self.begin(job)
            self.claim = number
            await asyncio.sleep(0.05)

    def begin(self, job: Claimed) -> None:
        if job.task == "hold":
            return
        self.crash_state.begin(job.held)
        (self.folder / f"begun-{job.id}-{job.fence}").touch()
        if job.task == "busy":
            # A call that keeps the interpreter: no other thread of this process runs meanwhile.
            ctypes.PyDLL(None).sleep(BUSY_SECONDS)
            (self.folder / f"awake-{job.id}").touch()
        elif job.task == "die":
            os._exit(9)
        elif job.task == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def on_signal(self) -> None:
        """The first signal requests the end, the second one forces it."""
        self.signals += 1
        (self.folder / f"asked-{self.signals}-{os.getpid()}").touch()
        if self.signals > 1 or not (self.folder / "be-slow").exists():
            self.over.set()

    async def watch_the_supervisor(self) -> None:
        await self.parent_pipe.wait()
        (self.folder / f"alone-{os.getpid()}").touch()
        self.over.set()


async def main(url: str, folder: str, slots: str, heartbeat: str, lease: str) -> None:
    store = await open_store(url)
    worker = SmallWorker(store, Path(folder), int(slots))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.on_signal)
    await worker.enter(float(lease))
    tasks = [
        asyncio.create_task(each)
        for each in (worker.renew(float(heartbeat)), worker.work(), worker.watch_the_supervisor())
    ]
    await worker.over.wait()
    for task in tasks:
        task.cancel()
    worker.crash_state.leave()
    await store.leave(worker.session, begun=[])
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
