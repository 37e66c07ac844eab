"""A pooler in front of a PostgreSQL server, as PgBouncer is in transaction mode, and less forgiving.

Each transaction of a client goes to the server's session that was used longest ago, so hardly two of them to the same
one; and whatever a session could remember is discarded before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections import deque
from collections.abc import Iterator
from urllib.parse import urlsplit

SESSIONS = 3
STARTUP, CANCEL, TLS, GSS = 196_608, 80_877_102, 80_877_103, 80_877_104
IDLE = b"I"
DISCARD = b"Q" + struct.pack("!i", 16) + b"DISCARD ALL\0"


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The type of a message, and the whole message."""
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)


class Session:
    """One session of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.greeting = b""

    @classmethod
    async def open(cls, host: str, port: int, startup: bytes) -> Session:
        session = cls(*await asyncio.open_connection(host, port))
        session.writer.write(startup)
        session.greeting = await session.answer()
        return session

    async def answer(self) -> bytes:
        """Everything up to the moment at which the server is ready."""
        told = []
        while True:
            kind, message = await _message(self.reader)
            told.append(message)
            if kind == b"Z":
                return b"".join(told)


class Pooler:
    """Takes clients in a thread of its own, until it is closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._server = parts.hostname, parts.port
        self._url = url
        self._free: deque[Session] = deque()
        self._came = asyncio.Condition()
        self._made = 0
        self._writers: list[asyncio.StreamWriter] = []
        self.sessions: dict[int, set[int]] = {}
        """For each client, the sessions that its transactions went to."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    @property
    def url(self) -> str:
        """The same database, through the pooler."""
        host, port = self._server
        return self._url.replace(f"{host}:{port}", f"127.0.0.1:{self.port}")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._serve())

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving = task
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            await server.serve_forever()
        finally:
            for writer in self._writers:
                writer.close()
            for writer in self._writers:
                with contextlib.suppress(Exception):
                    await writer.wait_closed()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        number = len(self.sessions)
        answering: asyncio.Task[None] | None = None
        try:
            startup = await self._begun(reader, writer)
            if startup is None:
                return
            self.sessions[number] = set()
            first = await self._taken(startup)
            writer.write(first.greeting)
            await self._give_back(first)
            while True:
                kind, message = await _message(reader)
                if kind == b"X":
                    return
                if answering is None or answering.done():
                    session = await self._taken(startup)
                    self.sessions[number].add(id(session))
                    answering = asyncio.create_task(self._answer(session, writer))
                session.writer.write(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if answering is not None and not answering.done():
                # The session is in the middle of a transaction: no other client may get it.
                answering.cancel()
                session.writer.close()
                self._made -= 1
            writer.close()

    async def _answer(self, session: Session, writer: asyncio.StreamWriter) -> None:
        """Forward what the server sends, until its transaction is over."""
        kind, message = await _message(session.reader)
        while not (kind == b"Z" and message[-1:] == IDLE):
            writer.write(message)
            kind, message = await _message(session.reader)
        await self._give_back(session)
        writer.write(message)

    async def _begun(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        while True:
            length = await reader.readexactly(4)
            rest = await reader.readexactly(struct.unpack("!i", length)[0] - 4)
            code = struct.unpack("!i", rest[:4])[0]
            if code in (TLS, GSS):
                writer.write(b"N")
            else:
                return length + rest if code == STARTUP else None

    async def _taken(self, startup: bytes) -> Session:
        async with self._came:
            if self._made < SESSIONS:
                self._made += 1
                session = await Session.open(*self._server, startup)
                self._writers.append(session.writer)
                return session
            await self._came.wait_for(lambda: bool(self._free))
            return self._free.popleft()

    async def _give_back(self, session: Session) -> None:
        session.writer.write(DISCARD)
        await session.answer()
        async with self._came:
            self._free.append(session)
            self._came.notify()


@contextlib.contextmanager
def pooled(url: str) -> Iterator[Pooler]:
    """A pooler in front of the server of a database."""
    pooler = Pooler(url)
    try:
        yield pooler
    finally:
        pooler.close()
