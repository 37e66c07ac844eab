"""Pictures of a busy system, for the documentation and for people to look at.

They are kept in the folder that FAIRLANE_PICTURES names (`make pictures`), else only as files of the test run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page, expect

from fairlane.http import service_of
from fairlane.model.reading import Counts, QueueReading

from .conftest import OpenPage
from .served import Served

BACKLOGS = {"ann": 1_200, "bob": 400, "cleo": 250, "dan": 160, "eve": 90}
ASKING = ("Finn", "Gina", "Hugo", "Ida", "Jon", "Kim")
LINE = 60
WAVES = 340


@pytest.fixture
def busy(served: Served) -> Iterator[Served]:
    """One customer sends in bulk, others less; a model has a line; some payments failed; some keys are bound."""
    for customer in ("ann", "bob", "ann", "ann"):
        served.send("charge", customer)
    served.burst()
    served.gate.open.set()
    # Long enough that some wait in every lane when the pages are shown, on a slow machine too.
    served.gate.seconds = 3.0
    for user, count in BACKLOGS.items():
        served.send_many("hold", [(user,)] * count)
    served.send_many("ask", [("flux", ASKING[n % len(ASKING)]) for n in range(LINE)])
    with served.working(slots=8), served.working(slots=6):
        for key in ("plan-7", "plan-8", "plan-9"):
            served.send("render", "ann", sticky=key)
        past(served)
        yield served


def past(served: Served) -> None:
    """Give the chart an hour of waves, as if the service had run that long."""
    history = service_of(served.web).history
    history._points.clear()
    [first, *_] = served.run(served.app.client.queues())
    now, completed, failed = time.time(), 0, 0
    for n in range(WAVES):
        completed += 60 + 35 * ((n // 20) % 3) + 11 * (n % 5)
        failed += 2 if n % 47 < 4 else 0
        history.note([_reading(first, completed, failed)], now - 10 * (WAVES - n))


def _reading(queue: QueueReading, completed: int, failed: int) -> QueueReading:
    counts = Counts(completed=completed, failed=failed)
    return msgspec.structs.replace(queue, classes=(Counts(), counts, Counts()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the pictures go."""
    named = os.environ.get("FAIRLANE_PICTURES")
    place = Path(named) if named else tmp_path / "pictures"
    place.mkdir(parents=True, exist_ok=True)
    return place


def shoot(page: Page, path: Path) -> None:
    expect(page.locator("[aria-busy]")).to_have_count(0)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    page.wait_for_timeout(700)  # bars slide into place
    page.screenshot(path=path)
    assert path.stat().st_size > 10_000


def test_pictures_of_every_page(busy: Served, open_page: OpenPage, folder: Path) -> None:
    page = open_page("#/queues/images", width=1200, height=820)
    # Shares are measured only while a page is open.
    expect(page.get_by_role("main")).to_contain_text(re.compile(r"in the last ([4-9]|\d\d) s"))
    expect(page.get_by_role("main")).to_contain_text("user:eve")
    shoot(page, folder / "queue.png")
    page.goto(busy.address)
    busy.send("hold", "zoe", priority="high")
    expect(page.locator('[data-worker="default/1"]')).to_be_visible()
    shoot(page, folder / "overview.png")
    page.emulate_media(color_scheme="dark")
    shoot(page, folder / "overview-dark.png")
    page.emulate_media(color_scheme="light")
    waiting = [job.id for job in busy.run(busy.app.client.lane_line("models", "flux", limit=100)).jobs if job.place]
    for name, path, seen in (
        ("lane", "queues/models/lanes/flux", "The first in line waits"),
        ("job", f"jobs/{waiting[-1]}", "in its lane"),
        ("failures", "failures", "card declined"),
        ("workers", "workers", "plan-7"),
        ("schedules", "schedules", "nightly"),
        ("search", "search?q=hold", "by task"),
    ):
        page.goto(f"{busy.address}#/{path}")
        expect(page.get_by_role("main")).to_contain_text(seen)
        shoot(page, folder / f"{name}.png")
    phone = open_page("#/queues/images", width=390, height=780, theme="dark")
    expect(phone.get_by_role("main")).to_contain_text("user:ann")
    shoot(phone, folder / "phone.png")
