"""Every page shows what happens while it happens, and does what its buttons say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from fairlane.client import Client
from fairlane.http.routes.celery import load_operations
from fairlane.integrations.celery.balancer.leases import Load
from fairlane.model.job import JobState
from fairlane.model.reading import QueueReading
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.slots import Slots

from .conftest import PATIENCE, OpenPage, Watched
from .served import Served


def test_the_overview_follows_queues_and_workers_and_leads_to_a_queue(served: Served, open_page: OpenPage) -> None:
    served.send("hold", "ann")
    page = open_page()
    expect(page.get_by_text("No worker is running").first).to_be_visible()
    images = page.locator('[data-queue="images"]')
    expect(images.locator("td").nth(1)).to_have_text("1")
    expect(page.get_by_label("What needs attention")).to_contain_text("no live worker serves the queue")
    with served.working():
        worker = page.locator('[data-worker="default/0"]')
        expect(worker.get_by_role("img")).to_have_attribute(
            "aria-label", "1 of 4 slots running, 2 free, 1 reserved for high"
        )
        expect(images.locator("td").nth(2)).to_have_text("1")
        expect(page.get_by_text("default/0 leads, term 1")).to_be_visible()
        served.gate.open.set()
        expect(images.locator("td").nth(2)).to_have_text("0")
    images.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("images")
    assert page.url.endswith("#/queues/images")


def test_a_queue_shows_its_lanes_and_which_job_is_next_and_is_paused(served: Served, open_page: OpenPage) -> None:
    for _ in range(5):
        served.send("render", "ann")
    page = open_page("#/queues/images")
    ann = page.locator('[data-lane="user:ann"]')
    expect(ann.locator("td").nth(1)).to_have_text("5")
    bob = served.send("render", "bob", priority="high")
    expect(page.locator('[data-lane="user:bob"]').locator("td").nth(1)).to_have_text("1")
    # An urgent job starts before those that came earlier.
    expect(page.locator(".next li").first).to_have_attribute("data-job", bob)
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("paused")
    assert queue(served, "images").settings.paused
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(page.get_by_role("heading", level=1)).not_to_contain_text("paused")
    page.get_by_role("button", name="Pause user:ann").click()
    expect(ann).to_contain_text("paused")
    page.get_by_role("button", name="Limit …").click()
    page.get_by_label("Jobs that may run at once").fill("3")
    page.get_by_role("button", name="Set the limit").click()
    expect(page.get_by_text("of 3", exact=True)).to_be_visible()
    assert queue(served, "images").settings.limit == 3


def queue(served: Served, name: str) -> QueueReading:
    [found] = [each for each in served.run(served.app.client.queues()) if each.name == name]
    return found


def test_a_lane_is_a_line_and_shows_why_its_first_job_waits(served: Served, open_page: OpenPage) -> None:
    with served.working():
        ids = [served.send("ask", "flux", person) for person in ("eve", "finn", "gina")]
        page = open_page("#/queues/models/lanes/flux")
        places = page.locator("tbody tr .place")
        expect(places).to_have_text(["▶", "1", "2"])
        expect(page.locator("tbody tr").nth(2)).to_contain_text('"flux", "gina"')
        expect(page.locator(".why")).to_contain_text("lane flux is at its limit of 1")
        hugo = served.send("ask", "flux", "hugo")
        expect(page.locator("tbody tr")).to_have_count(4)
        expect(page.locator("tbody tr").nth(3)).to_have_attribute("data-job", hugo)
        page.get_by_role("button", name="Cancel all …").click()
        expect(page.get_by_text("4 jobs will be cancelled.")).to_be_visible()
        page.get_by_role("button", name="Cancel them").click()
        expect(page.get_by_text("3 jobs cancelled, 1 running job asked to stop.")).to_be_visible()
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        expect(page.get_by_text("No job is in line")).to_be_visible()
        assert served.run(served.app.client.job(ids[1])).state is JobState.CANCELLED


def test_a_job_is_followed_from_its_place_to_its_result_and_run_again(served: Served, open_page: OpenPage) -> None:
    with served.working():
        served.send("ask", "flux", "eve")
        second = served.send("ask", "flux", "finn")
        page = open_page(f"#/jobs/{second}")
        standing = page.locator(".standing")
        expect(standing).to_contain_text("lane flux is at its limit of 1")
        expect(page.locator(".place-big")).to_contain_text("1 of 1 in its lane")
        served.gate.open.set()
        expect(page.get_by_role("heading", level=1)).to_contain_text("completed")
        expect(page.get_by_label("Result")).to_have_text('"flux has answered finn"')
        expect(page.locator(".timeline li").last).to_contain_text("default/0")
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.get_by_label("Text to copy")).to_contain_text('"args":["flux","finn"]')
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Copy as Python").click()
        expect(page.get_by_label("Text to copy")).to_contain_text('client.send("ask", args=["flux", "finn"]')
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Run again").click()
        expect(page.get_by_role("link", name=second)).to_be_visible()
        assert page.url != f"{served.address}#/jobs/{second}"


def test_a_running_job_shows_its_progress_and_is_asked_to_stop(served: Served, open_page: OpenPage) -> None:
    with served.working():
        id = served.send("hold", "ann")
        page = open_page(f"#/jobs/{id}")
        expect(page.get_by_role("progressbar")).to_have_attribute("value", "50")
        page.get_by_role("button", name="Ask it to stop").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("cancelled")


def test_failures_are_grouped_and_run_again_with_progress(served: Served, open_page: OpenPage) -> None:
    page = open_page("#/failures")
    expect(page.get_by_text("No failed job is kept")).to_be_visible()
    for _ in range(3):
        served.send("charge", "ann")
    served.burst()
    group = page.locator("tbody tr")
    expect(group).to_have_count(1)
    expect(group.locator("td").first).to_have_text("3")
    expect(group).to_contain_text("ValueError: card declined: ann")
    expect(group.locator("svg rect[height='20']")).not_to_have_count(0)
    page.get_by_role("button", name="Run again …").click()
    expect(page.get_by_text("3 jobs will be sent again.")).to_be_visible()
    box = page.get_by_role("dialog").bounding_box()
    assert box is not None
    assert abs(box["x"] + box["width"] / 2 - 640) < 20, "a dialog is in the middle, wherever its button stands"
    page.get_by_role("button", name="Send again").click()
    expect(page.get_by_text("3 jobs sent again.")).to_be_visible()
    assert queue(served, "payments").counts.pending == 3
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Run again …").click()
    expect(page.get_by_text("0 jobs will be sent again. 3 jobs left: already retried.")).to_be_visible()
    expect(page.get_by_role("button", name="Send again")).to_have_count(0)
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Cancel the rest …").click()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.get_by_text("3 jobs cancelled.")).to_be_visible()


def test_a_bulk_change_is_stopped_on_request(served: Served, open_page: OpenPage, watched: Watched) -> None:
    served.send("charge", "ann")
    served.burst()
    page = open_page("#/failures")

    # A change that never ends by itself: the service is asked, and does not answer.
    def hold(route: Route) -> None:
        if "dry_run" in (route.request.post_data or ""):
            route.continue_()
        else:
            watched.hold(route)

    page.route("**/jobs:retry", hold)
    page.get_by_role("button", name="Run again …").click()
    page.get_by_role("button", name="Send again").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped. 0 jobs sent again.")).to_be_visible()


def test_workers_show_their_sticky_keys_which_are_released(served: Served, open_page: OpenPage) -> None:
    with served.working():
        page = open_page("#/workers")
        card = page.locator('[data-worker="default/0"]')
        expect(card).to_contain_text("live")
        for key in ("plan-7", "plan-8", "plan-9"):
            served.send("render", "ann", sticky=key)
        expect(card.locator("[data-key]")).to_have_count(3)
        page.get_by_role("button", name="Release plan-7").click()
        expect(card.locator('[data-key="plan-7"]')).to_have_count(0)
        expect(page.get_by_role("row", name="plan-7")).to_contain_text("released")
        card.get_by_role("button", name="Drain: release all").click()
        expect(card.locator("[data-key]")).to_have_count(0)


def test_tokens_in_redis_are_counted_where_there_is_a_redis(
    served: Served, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page("#/workers")
    expect(page.get_by_text("No worker is running")).to_be_visible()
    expect(page.get_by_text("Tokens in Redis")).to_have_count(0)
    counted = {"deadlocks": 0, "tokens_pushed": 8_412, "tokens_failed": 7, "tokens_scanned": 9, "tokens_trimmed": 3}

    async def counters(_: Client) -> dict[str, int]:
        return counted | {"redis_down": 1}

    monkeypatch.setattr(Client, "counters", counters)
    expect(page.locator("[data-tokens=pushed]")).to_have_text("8,412")
    expect(page.locator("[data-tokens=failed]")).to_have_text("7")
    expect(page.get_by_text("1 Redis down: workers poll PostgreSQL")).to_be_visible()
    counted["tokens_pushed"] += 1
    expect(page.locator("[data-tokens=pushed]")).to_have_text("8,413")


def test_a_dead_worker_is_marked(served: Served, open_page: OpenPage) -> None:
    page = open_page("#/workers")
    session = NewSession(
        id="gone", kind=SessionKind.WORKER, lease=0.1, index=7, queues=("images",), slots=Slots(total=2)
    )
    served.run(_register(served, session))
    with served.working():
        expect(page.locator('[data-dead="default/7"]')).to_contain_text("dead")


async def _register(served: Served, session: NewSession) -> None:
    store = await served.app.connection.store()
    await store.register(session)


def test_a_schedule_is_run_now(served: Served, open_page: OpenPage) -> None:
    page = open_page("#/schedules")
    expect(page.get_by_text("Nothing is scheduled")).to_be_visible()
    with served.working():
        nightly = page.locator('[data-schedule="nightly"]')
        expect(nightly).to_contain_text("0 4 * * * UTC")
        expect(nightly).to_contain_text("in ")
        page.get_by_role("button", name="Run now: nightly").click()
        expect(page.get_by_label("Result")).to_have_text('"balanced"')
        assert re.search("#/jobs/.+", page.url)


def test_a_search_finds_jobs_by_whatever_they_are_known_by(served: Served, open_page: OpenPage) -> None:
    id = served.send("render", "ann", sticky="plan-7")
    other = served.send("render", "bob")
    page = open_page("#/search")
    found = page.locator("tbody tr")
    for text, by in ((id, "id"), ("user:ann", "lane"), ("plan-7", "sticky")):
        page.get_by_role("main").get_by_role("searchbox").fill(text)
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_text(f"by {by}")).to_be_visible()
        expect(found).to_have_count(1)
        expect(found).to_have_attribute("data-job", id)
    page.get_by_role("banner").get_by_role("searchbox").fill("render")
    page.keyboard.press("Enter")
    expect(found).to_have_count(2)
    served.burst()
    expect(page.locator(f'[data-job="{other}"]')).to_contain_text("completed")
    page.get_by_role("link", name=id).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("render")


def test_the_loads_of_celery_are_a_page_where_there_is_a_balancer(browser: Browser, tmp_path: Path) -> None:
    loads = {"queue_0": Load(3, 1), "queue_1": Load(0, 0)}
    served = Served(tmp_path, extra=[load_operations(lambda: loads)])
    try:
        page = browser.new_page(locale="en-GB")
        page.set_default_timeout(PATIENCE)
        page.goto(served.address)
        page.get_by_role("link", name="Celery").click()
        first = page.locator('[data-queue="queue_0"]')
        expect(first).to_contain_text("3")
        loads["queue_0"] = Load(12, 4)
        expect(first).to_contain_text("12")
        page.close()
    finally:
        served.close()
