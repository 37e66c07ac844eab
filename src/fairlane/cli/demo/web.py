"""The demo in the browser: the dashboard of the demo's own system, with the story told on its first page."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec
import uvicorn
from rich.text import Text

from ...http.access import Scope
from ...http.answers import Answer, json_answer
from ...http.application import create_app, service_of
from ...http.operation import Exchange, Operations
from ...http.settings import HttpSettings
from .application import app

if TYPE_CHECKING:
    from .command import Output
    from .fleet import Fleet
    from .story import Story

SENTENCES = 20
HOST = "127.0.0.1"


class Sentence(msgspec.Struct, frozen=True):
    """One sentence of the story."""

    at: float
    text: str


class StoryView(msgspec.Struct, frozen=True):
    """The story so far."""

    round: int
    sentences: list[Sentence]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the demo, which stops its workers first."""
        yield


class WebOutput:
    """Tells the story on the dashboard, and prints it too."""

    def __init__(self, port: int, printed: Output) -> None:
        self._printed = printed
        try:
            # It listens from now on: a browser that comes before the server is ready waits a moment.
            self._listening = socket.create_server((HOST, port))
        except OSError as exc:
            raise click.ClickException(
                f"cannot listen on port {port} ({exc.strerror}); name another with --port"
            ) from None
        self._sentences: deque[Sentence] = deque(maxlen=SENTENCES)
        click.echo(f"The dashboard: http://{HOST}:{self._listening.getsockname()[1]}/  (Ctrl-C ends the demo)\n")

    def narrate(self, markup: str) -> None:
        """Add a sentence, and print it."""
        self._sentences.append(Sentence(time.time(), Text.from_markup(markup).plain))
        self._printed.narrate(markup)

    async def watch(self, fleet: Fleet, story: Story) -> None:
        """Serve the dashboard until cancelled."""
        web = create_app(app, settings=HttpSettings(signals=False, sample=0.5), extra=[self._operations(story)])
        server = _Server(uvicorn.Config(web, log_config=None, access_log=False))
        serving = asyncio.ensure_future(server.serve(sockets=[self._listening]))
        sideshow = asyncio.ensure_future(story.run_sideshow())
        try:
            await asyncio.shield(serving)
        finally:
            sideshow.cancel()
            service_of(web).stop()
            server.should_exit = True
            await asyncio.gather(sideshow, serving, return_exceptions=True)

    def _operations(self, story: Story) -> Operations:
        operations = Operations("story")

        @operations.add("GET", "/api/v1/story", Scope.READ, answer=StoryView, shows={"round": 1, "sentences": []})
        async def get_story(exchange: Exchange) -> Answer:
            """What the demo has told so far."""
            return json_answer(StoryView(story.round, list(self._sentences)))

        return operations
