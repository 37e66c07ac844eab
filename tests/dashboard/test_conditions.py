"""The pages under conditions: many lanes, a phone, a keyboard, a screen reader, a service that goes away."""

from __future__ import annotations

import json
import re
import time
from urllib.parse import unquote

import pytest
from playwright.sync_api import Page, expect

from .browsers import node_modules
from .conftest import OpenPage, Watched
from .served import Served

LANES = 10_000


def test_a_service_that_restarts_is_noticed_and_the_page_recovers(
    served: Served, open_page: OpenPage, watched: Watched
) -> None:
    watched.tolerant = True
    for _ in range(3):
        served.send("render", "ann")
    page = open_page("#/queues/images/lanes/user%3Aann")
    expect(page.locator("tbody tr")).to_have_count(3)
    served.stop()
    expect(page.get_by_text("connection lost, reconnecting")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(3)
    served.start()
    served.send("render", "ann")
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    ids = [row.get_attribute("data-job") for row in page.locator("tbody tr").all()]
    assert len(set(ids)) == 4
    served.burst()
    expect(page.get_by_text("No job is in line")).to_be_visible()


def test_ten_thousand_lanes_are_shown_in_pages(served: Served, open_page: OpenPage) -> None:
    served.send_many("render", [(f"u{n}",) for n in range(LANES)])
    served.send_many("render", [("first",), ("first",)])
    began = time.monotonic()
    page = open_page("#/queues/images")
    expect(page.locator("tbody tr")).to_have_count(100)
    assert time.monotonic() - began < 30
    expect(page.locator("tbody tr").first).to_have_attribute("data-lane", "user:first")
    page.get_by_role("button", name="Show more lanes").dispatch_event("click")
    expect(page.locator("tbody tr")).to_have_count(200)
    served.send("render", "first")
    expect(page.locator('[data-lane="user:first"] td').nth(1)).to_have_text("3")
    # The page stays small: it draws what it shows.
    assert page.evaluate("document.querySelectorAll('*').length") < 10_000


PAGES = ("", "queues/images", "queues/images/lanes/user%3Aann", "failures", "workers", "schedules", "search?q=render")


def go(page: Page, served: Served, path: str) -> None:
    """Go to a page, and wait until it shows its data."""
    page.goto(f"{served.address}#/{path}")
    shown = unquote(path.partition("?")[0])
    expect(page.locator(f'main[data-page="{shown}"]')).to_be_visible()
    expect(page.locator("[aria-busy]")).to_have_count(0)


@pytest.fixture
def busy(served: Served) -> Served:
    """A system in which every page has something to show."""
    for user in ("ann", "bob", "cleo"):
        for _ in range(3):
            served.send("render", user)
    served.send("charge", "ann")
    served.burst()
    served.send("render", "ann", sticky="plan-7")
    served.send("render", "dan", priority="low")
    return served


def test_every_page_fits_a_phone(busy: Served, open_page: OpenPage) -> None:
    page = open_page(width=360, height=740)
    for path in PAGES:
        go(page, busy, path)
        expect(page.get_by_role("navigation")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    page.get_by_role("link", name="Failures").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Failures")
    page.get_by_role("button", name="Run again …").click()
    expect(page.get_by_role("dialog")).to_be_in_viewport()


@pytest.mark.parametrize(("theme", "rules"), [("light", None), ("dark", ["color-contrast"])])
def test_axe_finds_no_serious_violation(busy: Served, open_page: OpenPage, theme: str, rules: list[str] | None) -> None:
    axe = (node_modules() / "axe-core" / "axe.min.js").read_text()
    page = open_page(theme=theme)
    # In the page's world, but not as one of its scripts: the policy stays as it is.
    page.evaluate(axe)
    options: dict[str, object] = {"resultTypes": ["violations"], "elementRef": False}
    if rules is not None:
        options["runOnly"] = rules
    [failed] = busy.run(busy.app.client.failures())
    for path in (*PAGES, f"jobs/{failed.example_id}"):
        go(page, busy, path)
        found = page.evaluate("options => axe.run(document, options)", options)
        serious = [
            (each["id"], [node["html"][:200] for node in each["nodes"]])
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], f"{path}: {json.dumps(serious, indent=1)}"


def test_the_keyboard_reaches_everything(busy: Served, open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator('[data-queue="images"]')).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    link = page.locator('[data-queue="images"]').get_by_role("link")
    for _ in range(30):
        page.keyboard.press("Tab")
        if link.evaluate("each => each === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("images")
    expect(page.get_by_role("main")).to_be_focused()
    page.get_by_role("button", name="Limit …").press("Enter")
    expect(page.get_by_label("Jobs that may run at once")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Limit …")).to_be_focused()


def test_rows_keep_their_order_while_a_hand_is_on_them(served: Served, open_page: OpenPage) -> None:
    for user, count in (("ann", 3), ("bob", 2)):
        for _ in range(count):
            served.send("render", user)
    page = open_page("#/queues/images")
    rows = page.locator("tbody tr")
    expect(rows.first).to_have_attribute("data-lane", "user:ann")
    page.locator('[data-lane="user:bob"]').hover()
    for _ in range(4):
        served.send("render", "bob")
    expect(page.locator('[data-lane="user:bob"] td').nth(1)).to_have_text("6")
    assert rows.first.get_attribute("data-lane") == "user:ann"
    page.mouse.move(5, 5)
    expect(rows.first).to_have_attribute("data-lane", "user:bob")


def test_times_are_those_of_the_reader(served: Served, open_page: OpenPage) -> None:
    id = served.send("render", "ann")
    page = open_page(f"#/jobs/{id}")
    sent = page.locator("dl.facts time").first
    expect(sent).to_have_text(re.compile("now|ago"))
    title = sent.get_attribute("title") or ""
    assert "CET" in title or "CEST" in title or "GMT+" in title


def test_the_first_paint_needs_no_data(served: Served, open_page: OpenPage, watched: Watched) -> None:
    page = open_page("#/failures")
    expect(page.get_by_role("navigation")).to_be_visible()
    page.route("**/api/**", watched.hold)
    page.reload()
    expect(page.get_by_text("Opening the dashboard …")).to_be_visible()
    assert page.locator("header.top").evaluate("each => getComputedStyle(each).display") == "flex"
