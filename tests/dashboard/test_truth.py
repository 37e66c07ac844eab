"""The dashboard shows correct data: exact values, long lines, and a stream that reconnects by itself."""

from __future__ import annotations

import ast
import re
import shlex
import threading
import time
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, expect

from fairlane.http import service_of
from fairlane.model.job import JobState
from fairlane.model.reading import Counts

from .conftest import OpenPage, Watched
from .served import Served
from .test_security import page_path

HIDE = """
hidden => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}
"""


def look_away(page: Page, hidden: bool) -> None:
    """Pretend that the reader switches to another tab, or comes back."""
    page.evaluate(HIDE, hidden)


def test_a_refused_stream_is_opened_again_when_the_reader_returns(
    served: Served, open_page: OpenPage, watched: Watched
) -> None:
    watched.tolerant = True
    served.send("render", "ann")
    page = open_page("#/queues/images/lanes/user%3Aann")
    expect(page.locator("[data-connection=live]")).to_be_visible()
    page.clock.install()
    page.route("**/line/events**", lambda route: route.fulfill(status=503, body="restarting"))
    served.stop()
    served.start()
    # The browser itself gives up a stream that is refused; only a new one helps.
    with page.expect_response("**/line/events**"):
        expect(page.locator("[data-connection=lost]")).to_be_visible()
    look_away(page, True)
    page.clock.run_for(5_000)
    page.unroute("**/line/events**")
    look_away(page, False)
    page.clock.run_for(3_000)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    served.send("render", "ann")
    expect(page.locator("tbody tr")).to_have_count(2)
    # Given up after a while, and what was read before is read again afterwards.
    look_away(page, True)
    page.clock.run_for(21_000)
    expect(page.locator("[data-connection=idle]")).to_be_attached()
    with page.expect_request("**/api/v1/queues/images"):
        look_away(page, False)
        expect(page.locator("[data-connection=live]")).to_be_visible()


def test_a_page_that_is_opened_unseen_has_no_stream(served: Served, open_page: OpenPage) -> None:
    served.send("render", "ann")
    page = open_page()
    expect(page.locator("[data-connection=live]")).to_be_visible()
    page.add_init_script("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.get_by_text("Nothing needs attention").or_(page.get_by_label("What needs attention"))).to_be_visible()
    assert not [url for url in asked if url.endswith("/events")]
    look_away(page, False)
    expect(page.locator('[data-queue="images"]')).to_be_visible()


def test_large_numbers_and_hostile_lanes_are_copied_exactly(served: Served, open_page: OpenPage) -> None:
    lane = "x'; touch owned; '"
    exact = {"10": 2**53 + 1, "9": 1.0, "t": [True, None, "true, null"]}

    @served.app.task(name="echo", queue="images", lane="{lane}")
    async def echo(lane: str, value: Any) -> Any:
        return value

    id = served.send("echo", lane, exact)
    served.burst()
    page = open_page(f"#/jobs/{id}")
    text = '{"10":9007199254740993,"9":1.0,"t":[true,null,"true, null"]}'
    expect(page.get_by_label("Result")).to_have_text(text)
    expect(page.get_by_label("Arguments by position")).to_contain_text(text)
    assert page.title() == "echo completed · Fairlane"
    page.get_by_role("button", name="Copy as curl").click()
    words = shlex.split(page.get_by_label("Text to copy").inner_text().replace("\\\n", " "))
    assert f'"args":["{lane}",{text}]' in words[words.index("-d") + 1]
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Copy as Python").click()
    copied = page.get_by_label("Text to copy").inner_text()
    call = copied.partition("args=")[2].partition(", queue=")[0]
    assert ast.literal_eval(call) == [lane, exact]
    assert "9007199254740993" in call
    assert "1.0" in call
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.goto(f"{served.address}#/queues/images/lanes/{page_path(lane)}")
    command = page.locator(".empty code").inner_text()
    assert shlex.split(command) == ["fairlane", "jobs", "--queue", "images", f"--lane={lane}"]


def test_the_end_of_a_job_is_shown_although_it_cannot_be_read_again(
    served: Served, open_page: OpenPage, watched: Watched
) -> None:
    watched.tolerant = True
    with served.working():
        id = served.send("hold", "ann")
        page = open_page(f"#/jobs/{id}")
        expect(page.get_by_role("progressbar")).to_have_attribute("value", "50")
        page.route(f"**/jobs/{id}", lambda route: route.fulfill(status=503, body="restarting"))
        served.gate.open.set()
        expect(page.get_by_label("Result")).to_have_text('"ann is done"')
        expect(page.get_by_role("alert")).to_be_visible()
        page.unroute(f"**/jobs/{id}")
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_text("ended")).to_be_visible()
    # A first read that fails is tried again too.
    page.route(f"**/jobs/{id}", lambda route: route.fulfill(status=503, body="restarting"))
    page.reload()
    expect(page.get_by_role("alert")).to_be_visible()
    page.unroute(f"**/jobs/{id}")
    expect(page.get_by_label("Result")).to_be_visible()


def test_lanes_that_are_gone_are_not_shown(served: Served, open_page: OpenPage) -> None:
    served.send_many("render", [(f"u{n:03}",) for n in range(250)])
    served.send_many("render", [("first",)] * 3)
    page = open_page("#/queues/images")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Show more lanes").click()
    expect(rows).to_have_count(200)
    last = rows.last.get_attribute("data-lane")
    for lane in ("user:first", last):
        served.run(served.app.client.cancel_all(queue="images", lane=lane))
        expect(page.locator(f'[data-lane="{lane}"]')).to_have_count(0)
    expect(rows).to_have_count(200)


def test_a_paused_lane_keeps_its_limit_in_the_dialog(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    served.send("ask", "flux", "eve")
    served.run(served.app.client.set_limit("models", 3, lane="flux"))
    served.run(served.app.client.pause("models", "flux"))
    page = open_page("#/queues/models/lanes/flux")
    expect(page.get_by_text("of 3", exact=True)).to_be_visible()
    page.get_by_role("button", name="Limit …").click()
    expect(page.get_by_label("Jobs that may run at once")).to_have_value("3")
    page.route("**/clear-limit", lambda route: route.fulfill(status=503, body=""))
    page.get_by_role("button", name="Back to the declared one").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("503")


def test_a_drain_releases_what_it_can_and_says_what_it_could_not(
    served: Served, open_page: OpenPage, watched: Watched
) -> None:
    watched.tolerant = True
    with served.working():
        for key in ("a", "b", "c"):
            served.send("render", "ann", sticky=key)
        page = open_page("#/workers")
        card = page.locator('[data-worker="default/0"]')
        expect(card.locator("[data-key]")).to_have_count(3)

        def refuse(route: Any) -> None:
            if '"b"' in (route.request.post_data or ""):
                route.fulfill(status=503, body="")
            else:
                route.continue_()

        page.route("**/bindings:release", refuse)
        card.get_by_role("button", name="Drain: release all").click()
        expect(card.get_by_role("alert")).to_contain_text("1 of 3 keys not released")
        expect(card.locator("[data-key]")).to_have_count(1)
        assert served.run(served.app.client.find(state=JobState.FAILED)).jobs == ()


def test_signing_out_ends_the_pages_of_other_tabs(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    token = served.token("read")
    page = open_page()
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    other = page.context.new_page()
    other.goto(served.address)
    expect(other.locator("[data-connection=live]")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()


def test_of_a_job_that_ran_again_no_wait_is_claimed(served: Served, open_page: OpenPage) -> None:
    once, again = served.send("render", "ann"), served.send("twice")
    page = open_page(f"#/jobs/{once}")
    with served.working():
        ended = page.locator(".standing")
        expect(ended).to_contain_text(re.compile(r"started \d.* after it was sent, ran \d"))
        page.goto(f"{served.address}#/jobs/{again}")
        expect(ended).to_contain_text("its last run took")
        expect(ended).not_to_contain_text("after it was sent")


def test_the_timeline_of_a_job_that_never_ran_says_that_it_waited(served: Served, open_page: OpenPage) -> None:
    id = served.send("render", "ann")
    page = open_page(f"#/jobs/{id}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("cancelled")
    expect(page.locator(".timeline li")).to_have_count(1)
    expect(page.locator(".timeline li")).to_contain_text("waited")
    expect(page.get_by_text("cancelled (by user)")).to_be_visible()
    # A broadcast has no run of its own, but copies.
    with served.working():
        nightly = served.app.registry.find("nightly").call()
        page.goto(f"{served.address}#/jobs/{served.run(served.app.client.broadcast(nightly)).id}")
        expect(page.get_by_role("heading", level=1)).to_contain_text("completed")
        expect(page.locator(".timeline li")).to_have_count(1)
        expect(page.locator(".timeline li")).to_contain_text("completed")


def test_a_search_says_that_it_shows_the_first_jobs(served: Served, open_page: OpenPage) -> None:
    for user in ("ann", *"bcdefghijk"):
        served.send("render", user)
    page = open_page("#/search?q=render")
    expect(page.get_by_text("at most 10 are shown")).to_be_visible()
    page.goto(f"{served.address}#/search?q=user%3Aann")
    expect(page.get_by_role("heading", name="1 job by lane")).to_be_visible()
    expect(page.get_by_text("at most 10 are shown")).to_have_count(0)


def test_a_change_of_very_many_jobs_changes_all_of_them(served: Served, open_page: OpenPage) -> None:
    served.send_many("render", [("ann",)] * 10_001)
    page = open_page("#/queues/images/lanes/user%3Aann")
    page.get_by_role("button", name="Cancel all …").click()
    expect(page.get_by_text("More than 10,000 jobs will be cancelled.")).to_be_visible()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.get_by_text("10,001 jobs cancelled.")).to_be_visible()


def test_rates_are_those_of_the_time_that_was_observed(
    served: Served, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = service_of(served.web).history
    served.send("render", "ann")
    [first, *_] = served.run(served.app.client.queues())
    note = history.note
    monkeypatch.setattr(history, "note", lambda *_: None)
    history._points.clear()
    # Ten jobs a second, all the time; nothing was read for five minutes, and the last minute has just begun.
    begin = time.time() // 60 * 60 - 1_800
    for n in (*range(90), *range(120, 181)):
        counts = Counts(completed=100 * n)
        note([msgspec.structs.replace(first, classes=(Counts(), counts, Counts()))], begin + 10 * n)
    page = open_page()
    chart = page.locator(".chart")
    expect(chart).to_have_attribute("aria-label", re.compile("10 per second at most, 10 at the end"))
    expect(page.locator(".figure").filter(has_text="Failed, last hour")).to_contain_text("since")


def test_the_chart_of_a_service_that_has_just_started_has_an_axis_of_times(open_page: OpenPage) -> None:
    page = open_page("#/schedules")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.evaluate(
        "() => { window.drawn = []; const own = CanvasRenderingContext2D.prototype.fillText;"
        " CanvasRenderingContext2D.prototype.fillText = function (text, ...rest)"
        " { window.drawn.push(text); own.call(this, text, ...rest); }; }"
    )
    page.get_by_role("link", name="Overview").click()
    times: list[str] = []
    end = time.monotonic() + 60
    while not times and time.monotonic() < end:
        page.wait_for_timeout(50)
        times = [text for text in page.evaluate("window.drawn") if ":" in text]
    assert len(set(times)) > 2


def test_a_service_that_hangs_is_noticed(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    served.send("render", "ann")
    page = open_page("#/queues/images/lanes/user%3Aann")
    expect(page.locator("[data-connection=live]")).to_be_visible()
    page.clock.install()
    goes_on = threading.Event()
    served.loop.call_soon_threadsafe(goes_on.wait)
    try:
        # Its connections are open, and nothing comes.
        page.clock.run_for(15_000)
        expect(page.locator("[data-connection=lost]")).to_be_visible()
    finally:
        goes_on.set()
    page.clock.run_for(15_000)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    served.send("render", "ann")
    expect(page.locator("tbody tr")).to_have_count(2)


def test_a_refused_stream_says_why(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    served.send("render", "ann")
    made = served.app.client.make_token("ann", ["read"], queues=["images"], lane_prefix="user:ann")
    page = open_page("#/queues/images/lanes/user%3Abob")
    page.get_by_label("Token").fill(served.run(made)[1])
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("this token is bound to lane 'user:ann'")
    expect(page.locator("[aria-busy]")).to_have_count(0)
    page.goto(f"{served.address}#/queues/images/lanes/user%3Aann")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_failed_sign_out_is_reported(served: Served, open_page: OpenPage, watched: Watched) -> None:
    watched.tolerant = True
    page = open_page()
    page.get_by_label("Token").fill(served.token("read"))
    page.get_by_role("button", name="Sign in").click()
    page.route("**/api/v1/session", lambda route: route.abort())
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("alert")).to_contain_text("the service cannot be reached")
