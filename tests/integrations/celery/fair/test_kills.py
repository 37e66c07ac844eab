"""Child processes, workers and brokers are killed in turn, under load: every task ends exactly once."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random

import pytest

from fairlane.model.job import Job, JobState, Reason
from tests.integrations.celery.kit import CeleryProcess, eventually
from tests.servers.valkey import ValkeyServer, own_server
from tests.sizes import sized, strict

from .site import Site

KILLS = sized(4, 50)
AT_ONCE = 12
"""Tasks that are sent before each kill."""
SECONDS = 0.1
"""How long each runs."""
TASKS = ("note", "late", "lasting")
WORKERS = 2


@pytest.fixture
def broker() -> Iterator[ValkeyServer]:
    """A broker that forgets everything when it is killed."""
    with own_server() as server:
        yield server


@pytest.fixture
def site(tmp_path: Path, broker: ValkeyServer) -> Iterator[Site]:
    """A shop with two workers, whose jobs and results are in another server than its broker."""
    made = Site(tmp_path, broker=broker.url)
    try:
        for _ in range(WORKERS):
            start(made, ready=False)
        for worker in made.workers:
            worker.ready()
        yield made
    finally:
        made.close()


def start(site: Site, *, ready: bool) -> CeleryProcess:
    """Start a worker with two child processes."""
    return site.worker("-P", "prefork", "-c", "2", ready=ready)


class Kills:
    """What is sent and killed."""

    def __init__(self, site: Site, broker: ValkeyServer) -> None:
        self.site = site
        self.broker = broker
        self.random = Random(5)
        self.sent: dict[str, tuple[str, str]] = {}
        """The task and the word of every id."""

    def send(self) -> None:
        """Send tasks of every kind, for two tenants."""
        for name in islice(cycle(TASKS), AT_ONCE):
            word = f"{name}-{len(self.sent)}."
            tenant = self.random.choice(("ann", "bob"))
            result = self.site.task(name).apply_async((word, SECONDS), headers={"tenant": tenant})
            self.sent[result.id] = name, word

    def child(self) -> None:
        """Kill a child process of a worker."""

        def kill() -> bool:
            worker = self.random.choice(self.live())
            children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
            if not children:
                return False  # they are being replaced
            os.kill(int(self.random.choice(children)), signal.SIGKILL)
            return True

        eventually(kill)

    def main(self) -> None:
        """Kill a worker, and start another."""
        self.random.choice(self.live()).kill()
        start(self.site, ready=False)

    def broker_server(self) -> None:
        """Kill the broker; tasks are sent while it is gone."""
        self.broker.kill()
        self.send()
        self.broker.start()

    def supervise(self) -> None:
        """Start workers in the place of those that ended by themselves, as a supervisor does.

        Celery ends with an error if a child dies before it has reported, or while the broker is away.
        """
        for _ in range(WORKERS - len(self.live())):
            start(self.site, ready=False)

    def have_ended(self, count: int) -> bool:
        """Whether so many tasks have run to their end."""
        self.supervise()
        return self.site.has_ended(count)

    def none_is_left(self) -> bool:
        """Whether no job waits or runs."""
        self.supervise()
        counts = [queue.counts for queue in self.site.shop.fairlane.blocking.queues()]
        return not any(each.scheduled or each.pending or each.running for each in counts)

    def live(self) -> list[CeleryProcess]:
        """The workers that run."""
        return [worker for worker in self.site.workers if worker.process.poll() is None]

    def ends(self) -> int:
        """How many tasks have run to their end."""
        return len(self.site.shop.lines("end"))


@strict
@pytest.mark.timeout(sized(180, 1_200))
def test_every_task_ends_once_however_many_are_killed(site: Site, broker: ValkeyServer) -> None:
    kills = Kills(site, broker)
    for kill in islice(cycle((kills.child, kills.main, kills.broker_server)), KILLS):
        before = kills.ends()
        kills.send()
        # Under load: some have ended, and others run.
        eventually(partial(kills.have_ended, before + 2))
        kill()
    eventually(kills.none_is_left)
    jobs = {id: site.ended(id) for id in kills.sent}
    begun = Counter(line.partition(" ")[2] for line in site.shop.lines("begin"))
    ended = Counter(line.partition(" ")[2] for line in site.shop.lines("end"))
    for id, (name, word) in kills.sent.items():
        check(jobs[id], name, begun[word], ended[word])
    assert sum(job.state is JobState.COMPLETED for job in jobs.values()) > len(jobs) / 2
    # No job is left, and all counts agree with that.
    recount = site.shop.fairlane.blocking.recount()
    assert (recount.jobs, recount.differences) == (0, ())


def check(job: Job, name: str, begun: int, ended: int) -> None:
    """Check how a job has ended, by its attempts and by how often its task began and ended."""
    outcomes = [attempt.outcome for attempt in job.attempts]
    what = f"{job.id} {name}: {job.state} {job.reason} {outcomes}, began {begun}, ended {ended} times"
    assert outcomes.count("completed") == (job.state is JobState.COMPLETED), what
    if job.state is JobState.COMPLETED:
        assert outcomes[-1] == "completed", what
        assert ended >= 1, what
    else:
        assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED), what
    assert begun <= len(outcomes), what
    if name == "note":
        assert begun <= 1, what
    if name == "lasting" and job.state is JobState.FAILED:
        assert len(outcomes) == job.retries + 1, what
