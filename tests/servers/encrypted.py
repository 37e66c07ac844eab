"""TLS in front of a test server, because the program of the wheel has none: what goes in encrypted comes out plain."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import trustme


class Authority:
    """Who certifies servers and clients, with the files that a client names."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        mine = self._authority.issue_cert("client.example")
        mine.cert_chain_pems[0].write_to_path(self.cert)
        mine.private_key_pem.write_to_path(self.key)

    def context(self, name: str = "127.0.0.1", *, asks: bool = False) -> ssl.SSLContext:
        """What a server of this name needs; `asks` lets it ask clients for a certificate too."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert(name).configure_cert(context)
        if asks:
            self._authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@contextlib.asynccontextmanager
async def encrypted(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port at which the server behind `port` is reached by TLS."""
    talks: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        for pumping in (pump(reader, there[1]), pump(there[0], writer)):
            task = asyncio.create_task(pumping)
            talks.add(task)
            task.add_done_callback(talks.discard)

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
        if talks:
            await asyncio.wait(talks, timeout=5)
