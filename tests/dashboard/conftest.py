"""One browser for each test process, and for each test a service with a store of its own and a fresh page.

Playwright keeps an event loop running in the thread that uses it. So the browser and its tests have a thread of their
own: in that of pytest, no other test could run a loop any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, Route, expect, sync_playwright

from .browsers import FLAGS, chromium
from .served import Served

PATIENCE = 60_000
"""Milliseconds."""
expect.set_options(timeout=PATIENCE)

OpenPage = Callable[..., Page]
THREAD = ThreadPoolExecutor(1, "browser")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the tests of a browser in its thread."""
    if "browser" not in pyfuncitem.fixturenames:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    THREAD.submit(pyfuncitem.obj, **arguments).result()
    return True


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real Chromium."""
    playwright = THREAD.submit(sync_playwright().start).result()
    try:
        launch = playwright.chromium.launch
        browser = THREAD.submit(launch, executable_path=chromium(), args=list(FLAGS), timeout=PATIENCE).result()
        yield browser
        THREAD.submit(browser.close).result()
    finally:
        THREAD.submit(playwright.stop).result()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A service with its dashboard."""
    served = Served(tmp_path)
    yield served
    served.close()


class Watched:
    """What a browser did wrong while it was watched."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.errors: list[str] = []
        self.outside: list[str] = []
        self.held: list[Route] = []
        """Requests that a test has left without an answer. They end with it: else tasks of Playwright wait for ever."""
        self.tolerant = False
        """Whether failed requests are expected, because a test stops the service."""

    def watch(self, context: BrowserContext) -> None:
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on("console", self._console)
        context.route("**/*", self._request)

    def hold(self, route: Route) -> None:
        """Leave a request without an answer until the test ends."""
        self.held.append(route)

    def release(self) -> None:
        """End the requests that are held."""
        for route in self.held:
            # The page may have given it up.
            with suppress(Error):
                route.abort()

    def _console(self, message: Any) -> None:
        if message.type == "error" and not (self.tolerant and "Failed to load resource" in message.text):
            self.errors.append(message.text)

    def _request(self, route: Route) -> None:
        if route.request.url.startswith((self.address, "data:")):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()


@pytest.fixture
def watched(served: Served) -> Watched:
    """The errors of the test's pages; a test may tolerate some."""
    return Watched(served.address)


@pytest.fixture
def open_page(browser: Browser, served: Served, watched: Watched) -> Iterator[OpenPage]:
    """Opens a page of the dashboard. No page may raise an error, break the policy or ask for anything elsewhere."""
    contexts: list[BrowserContext] = []

    def open(path: str = "#/", *, width: int = 1280, height: int = 900, theme: Any = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, locale="en-GB", timezone_id="Europe/Berlin"
        )
        context.set_default_timeout(PATIENCE)
        watched.watch(context)
        contexts.append(context)
        page = context.new_page()
        page.goto(served.address + path)
        return page

    yield open
    if watched.held:
        watched.tolerant = True
        THREAD.submit(watched.release).result()
    for context in contexts:
        THREAD.submit(context.close).result()
    assert watched.errors == []
    assert watched.outside == []
