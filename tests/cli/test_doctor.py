"""The doctor: every problem is found and reported with advice, and a healthy system has none."""

from collections.abc import AsyncIterator

import pytest

from fairlane import open_store
from fairlane.doctor import diagnose
from fairlane.errors import StoreUnavailable
from fairlane.model.ids import retry_id
from fairlane.model.job import Reason
from fairlane.model.settings import LaneRule, QueueOverride, SettingsChange
from fairlane.model.states import fail, retry
from fairlane.runtime.connection import Connection
from fairlane.store.clock import ManualClock
from fairlane.store.diagnosis import Diagnosable, Finding, Level
from fairlane.store.port import Store
from tests.cli.project import Project
from tests.conformance.kit import Kit


class Practice:
    """A system to diagnose."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.kit = Kit(store, clock)

    async def look(self, *, recount: bool = False, offset: float = 0.0) -> list[Finding]:
        """The findings of the doctor."""

        async def same() -> Store:
            return self.store

        return await diagnose(Connection(same), recount=recount, wall=lambda: self.clock.now() + offset)

    async def found(self, topic: str) -> Finding:
        """The only finding about a topic."""
        [finding] = [finding for finding in await self.look() if finding.topic == topic]
        return finding


@pytest.fixture
async def practice(store_url: str) -> AsyncIterator[Practice]:
    """An empty store with a clock that stands still."""
    clock = ManualClock()
    store = await open_store(store_url, clock=clock)
    yield Practice(store, clock)
    await store.close()


async def test_a_healthy_system_has_no_findings_but_good_ones(practice: Practice) -> None:
    worker = await practice.kit.worker()
    await practice.store.lead(worker.session.id, lease=10.0)
    await practice.kit.enqueue(lane="user:ann")
    own = await practice.store.findings() if isinstance(practice.store, Diagnosable) else []
    findings = await practice.look(recount=True)
    assert [finding.topic for finding in findings[2 : 2 + len(own)]] == [finding.topic for finding in own]
    # What the store reports about itself depends on its server, and is tested there.
    del findings[2 : 2 + len(own)]
    assert {finding.level for finding in findings} == {Level.OK}
    topics = ["store", "clock", "leader", "sessions", "queues", "tasks", "lanes", "bindings", "failures", "recount"]
    assert [finding.topic for finding in findings] == topics


async def test_a_task_that_no_live_worker_knows_is_named(practice: Practice) -> None:
    worker = await practice.kit.worker(tasks=("other",))
    await practice.kit.enqueue("shop.draw")
    await worker.decline(*await worker.claim())
    practice.clock.advance(5)
    finding = await practice.found("tasks")
    assert finding.level is Level.ERROR
    assert finding.what.startswith("shop.draw: 1 job of queue default is waiting, the first for 5 s")
    await practice.kit.worker(tasks=("shop.draw",))
    assert (await practice.found("tasks")).level is Level.OK


async def test_an_empty_store_is_no_error(practice: Practice) -> None:
    assert Level.ERROR not in {finding.level for finding in await practice.look()}


async def test_a_store_that_is_away_is_the_only_finding() -> None:
    async def away() -> Store:
        raise StoreUnavailable("the server does not answer")

    [finding] = await diagnose(Connection(away))
    assert (finding.level, finding.topic) == (Level.ERROR, "store")
    assert "does not answer" in finding.what


async def test_a_clock_that_differs_is_reported(practice: Practice) -> None:
    findings = await practice.look(offset=-30.0)
    [finding] = [finding for finding in findings if finding.topic == "clock"]
    assert finding.level is Level.WARN
    assert "30.0 s ahead" in finding.what


async def test_a_fleet_without_a_leader_is_an_error(practice: Practice) -> None:
    await practice.kit.worker()
    assert (await practice.found("leader")).level is Level.ERROR


async def test_late_renewals_are_reported_before_and_after_the_lease_has_ended(practice: Practice) -> None:
    await practice.kit.worker()
    practice.clock.advance(11.0)
    assert (await practice.found("sessions")).level is Level.WARN
    practice.clock.advance(9.0)
    finding = await practice.found("sessions")
    assert finding.level is Level.ERROR
    assert "expired 5 s ago" in finding.what


async def test_a_queue_without_a_worker_is_an_error(practice: Practice) -> None:
    await practice.kit.worker("other")
    await practice.kit.enqueue(queue="lonely")
    finding = await practice.found("queues")
    assert finding.level is Level.ERROR
    assert finding.advice is not None
    assert "-Q lonely" in finding.advice


async def test_a_paused_queue_with_work_is_reported_with_the_way_out(practice: Practice) -> None:
    await practice.kit.worker()
    await practice.kit.enqueue()
    await practice.store.configure([SettingsChange(queue="default", override=QueueOverride(paused=True))])
    finding = await practice.found("queues")
    assert (finding.level, finding.advice) == (Level.WARN, "fairlane resume default")


async def test_a_paused_lane_is_reported(practice: Practice) -> None:
    await practice.kit.worker()
    await practice.kit.settings("default", LaneRule(pattern="user:ann", paused=True))
    await practice.kit.enqueue(lane="user:ann")
    finding = await practice.found("lanes")
    assert finding.level is Level.WARN
    assert "user:ann" in finding.what


async def test_a_lane_whose_head_waits_for_a_dead_worker_stands_still(practice: Practice) -> None:
    await practice.kit.worker(lease=600.0)
    await practice.kit.settings("default", LaneRule(pattern="*", limit=1))
    head = await practice.kit.enqueue(lane="document", worker=7)
    await practice.kit.enqueue(lane="document")
    assert (await practice.found("lanes")).level is Level.OK
    practice.clock.advance(60.0)
    finding = await practice.found("lanes")
    assert finding.level is Level.WARN
    assert finding.advice == f"fairlane job {head}"
    assert "default/7" in finding.what


async def test_a_lane_that_moves_is_well_however_long_it_is(practice: Practice) -> None:
    worker = await practice.kit.worker(lease=600.0)
    await practice.kit.settings("default", LaneRule(pattern="*", limit=1))
    for _ in range(5):
        await practice.kit.enqueue(lane="document")
    await worker.claim()
    practice.clock.advance(300.0)
    assert (await practice.found("lanes")).level is Level.OK


async def test_bindings_to_a_dead_worker_are_reported(practice: Practice) -> None:
    worker = await practice.kit.worker(index=2)
    await practice.kit.enqueue(sticky="plan-7")
    assert (await practice.found("bindings")).level is Level.OK
    await practice.store.leave(worker.session.id, begun=[])
    finding = await practice.found("bindings")
    assert finding.level is Level.WARN
    assert "default/2" in finding.what


async def test_recent_failures_are_reported_by_task_and_group(practice: Practice) -> None:
    worker = await practice.kit.worker(lease=90_000.0)
    for _ in range(3):
        await practice.kit.enqueue("shop.render", retries=0)
    jobs = await worker.claim(3)
    endings = [fail(job.held, Reason.ERROR, "boom", group="ValueError in <lambda>") for job in jobs]
    await practice.store.finish(worker.session.id, endings)
    finding = await practice.found("failures")
    assert finding.level is Level.WARN
    assert "3 jobs of shop.render" in finding.what
    assert (finding.advice or "").endswith("then fairlane retry --task shop.render --error 'ValueError in <lambda>'")
    practice.clock.advance(7_200.0)
    assert (await practice.found("failures")).level is Level.OK


async def test_failures_that_were_retried_are_not_recommended_for_a_retry(practice: Practice) -> None:
    worker = await practice.kit.worker()
    ids = [await practice.kit.enqueue("shop.render", retries=0) for _ in range(3)]
    jobs = await worker.claim(3)
    await practice.store.finish(worker.session.id, [fail(job.held, Reason.ERROR, "boom") for job in jobs])
    await practice.kit.enqueue(id=retry_id(ids[0]))
    assert "2 jobs of shop.render" in (await practice.found("failures")).what
    for id in ids[1:]:
        await practice.kit.enqueue(id=retry_id(id))
    finding = await practice.found("failures")
    assert (finding.level, finding.advice) == (Level.OK, None)
    assert "was retried" in finding.what


async def test_a_job_that_waits_for_its_retry_is_no_failure(practice: Practice) -> None:
    worker = await practice.kit.worker()
    await practice.kit.enqueue()
    [job] = await worker.claim()
    await practice.store.finish(worker.session.id, [retry(job.held, 5.0, Reason.ERROR, "boom")])
    assert (await practice.found("failures")).level is Level.OK


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_exits_with_1_when_there_is_an_error(project: Project) -> None:
    assert project.run("doctor").exit_code == 0
    project.good("enqueue", "any.task")
    result = project.run("doctor")
    assert result.exit_code == 1
    assert "no live worker serves the queue" in result.stdout
    assert "fairlane worker -A module:app -Q default" in result.stdout


def test_the_command_names_the_version_of_sqlite(project: Project) -> None:
    findings = project.read("doctor", "--recount")["findings"]
    assert {"sqlite", "recount"} <= {finding["topic"] for finding in findings}


def test_an_old_sqlite_is_explained(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 40, 1))
    [finding] = [f for f in project.read("doctor")["findings"] if f["topic"] == "sqlite"]
    assert finding["level"] == "warn"
    assert "WAL-reset" in finding["what"]
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 51, 3))
    [finding] = [f for f in project.read("doctor")["findings"] if f["topic"] == "sqlite"]
    assert finding["level"] == "ok"
