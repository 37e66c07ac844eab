"""Redis with TLS: which servers are trusted, and that connections break and end as quietly as without TLS."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from fairlane.errors import FairlaneError, InvalidInput, StoreError, StoreUnavailable
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from tests.servers import valkey
from tests.servers.encrypted import Authority, encrypted

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The certificate authority of the tests."""
    return Authority(tmp_path_factory.mktemp("authority"))


async def asked(url: str, *command: str) -> object:
    """What is answered at a URL, or the error."""
    connections = Connections(parse(url))
    try:
        return await connections.call(*(command or ("PING",)))
    except FairlaneError as exc:
        return exc
    finally:
        await connections.close()


async def test_a_server_that_is_certified_is_trusted(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context()) as port:
        assert await asked(f"rediss://127.0.0.1:{port}?ca={authority.ca}") == b"PONG"
        assert await asked(f"valkeys://127.0.0.1:{port}/3?ca={authority.ca}", "ECHO", "mine") == b"mine"


async def test_an_untrusted_server_is_accepted_only_with_verify_none(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context()) as port:
        error = await asked(f"rediss://127.0.0.1:{port}")
        assert await asked(f"rediss://127.0.0.1:{port}?verify=none") == b"PONG"

    assert type(error) is StoreError
    assert "the TLS handshake failed" in str(error)
    assert "ca=" in str(error)


async def test_a_server_with_another_name_is_not_trusted(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context("other.example")) as port:
        error = await asked(f"rediss://127.0.0.1:{port}?ca={authority.ca}")

    assert type(error) is StoreError
    assert "the TLS handshake failed" in str(error)


async def test_a_server_that_asks_for_a_certificate_gets_ours(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context(asks=True)) as port:
        url = f"rediss://127.0.0.1:{port}?ca={authority.ca}"
        assert await asked(f"{url}&cert={authority.cert}&key={authority.key}") == b"PONG"
        assert isinstance(await asked(url), StoreError)


async def test_a_certificate_that_was_replaced_is_read_again(authority: Authority, tmp_path: Path) -> None:
    mine = tmp_path / "mine.pem"
    Authority(tmp_path).ca.rename(mine)
    async with encrypted(valkey.server().port, authority.context()) as port:
        url = f"rediss://127.0.0.1:{port}?ca={mine}"
        assert isinstance(await asked(url), StoreError)
        mine.write_bytes(authority.ca.read_bytes())
        assert await asked(url) == b"PONG"


@pytest.mark.parametrize("option", ["ca", "cert"])
async def test_a_file_that_cannot_be_read_is_named(option: str, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    for name in ("missing.pem", "text.pem"):
        error = await asked(f"rediss://127.0.0.1:1?{option}={tmp_path / name}")
        assert type(error) is InvalidInput
        assert option in str(error)


async def test_the_one_with_tls_and_the_other_without(authority: Authority) -> None:
    error = await asked(f"rediss://127.0.0.1:{valkey.server().port}?connect_timeout=1&verify=none")
    async with encrypted(valkey.server().port, authority.context()) as port:
        other = await asked(f"redis://127.0.0.1:{port}?connect_timeout=1")

    assert isinstance(error, StoreError)
    assert isinstance(other, StoreUnavailable)


async def test_a_connection_that_was_ended_while_idle_is_not_used(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context()) as port:
        connections = Connections(parse(f"rediss://127.0.0.1:{port}?ca={authority.ca}&pool=2"))
        for _ in range(3):
            ended = await connections.call("CLIENT", "ID")
            await asyncio.to_thread(valkey.server().ask, "CLIENT", "KILL", "ID", ended)
            # It takes a moment until that has come through.
            await asyncio.sleep(0.05)
            assert await connections.call("CLIENT", "ID") != ended
        await connections.close()


async def test_cancelling_spoils_nothing(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context()) as port:
        connections = Connections(parse(f"rediss://127.0.0.1:{port}?ca={authority.ca}&pool=2"))
        for number in range(40):
            calls = [asyncio.create_task(connections.call("ECHO", f"{number}.{place}")) for place in range(3)]
            await asyncio.sleep(0.0005 * (number % 8))
            calls[0].cancel()
            calls[1].cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert answers[2] == f"{number}.2".encode()
        await connections.close()


async def test_the_end_of_an_event_loop_leaves_nothing(authority: Authority) -> None:
    async with encrypted(valkey.server().port, authority.context()) as port:
        connections = Connections(parse(f"rediss://127.0.0.1:{port}?ca={authority.ca}"))
        assert await asyncio.to_thread(lambda: asyncio.run(connections.call("PING"))) == b"PONG"
        assert not connections._pools
        gc.collect()
        await connections.close()
