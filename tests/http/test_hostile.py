"""Malformed and hostile requests get a 4xx within bounds, and nothing of them is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from fairlane import Fairlane
from fairlane.http import HttpSettings, create_app
from fairlane.http.bodies import check_nesting

from .conftest import API, client_of
from .test_jobs import is_problem

JSON = {"Content-Type": "application/json"}
STRANGE = [
    "\0",
    "\n",
    "\x1b[31m",
    "\x7f",
    "\u202e",
    "\u2066x",
    "\ud800",
    "",
    " " * 300,
    "x" * 1_000_000,
    "\r\nSet-Cookie: a=b",
]
KEYS = ("lane", "unique", "sticky", "id")


def job(**options: object) -> dict[str, object]:
    return {"task": "add", "args": [1], "options": options}


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


BODIES = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe{}",
    b'{"task": "add", "args": [1]',
    b'{"task": "add", "args": [NaN]}',
    b'{"task": "add", "args": [Infinity]}',
    b'{"task": "add", "args": [1e999]}',
    b'{"task": "add", "args": [' + b"9" * 5_000 + b"]}",
    b'{"task": "add", "args": ["' + b"x" * 1_000_000 + b'"]}',
    b'{"task": "add", "args": ["' + b"x" * 2_000_000 + b'"]}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"task": "add", "args": [' + b"[" * 65 + b"]" * 65 + b"]}",
    b'{"task": "add", "args": [1], "args2": 1}',
    b'{"task": "\\u0000"}',
    b'{"task": "../../etc/passwd"}',
    b'{"task": "add", "args": ["\\ud800"]}',
    raw('{"task": "add", "args": ["\ud800"]}'),
    b'{"task": "add", "args": [1], "options": {"priority": null}}',
    b'{"task": "add", "args": [1], "options": {"delay": 1e300}}',
    b'{"task": "add", "args": [1], "options": {"run_at": -1}}',
    b'{"task": "add", "args": [1], "options": {"retries": 99999999999999999999}}',
    b'{"task": "add", "args": [1], "options": {"worker": -1}}',
    b'{"task": "add", "args": [1], "kwargs": {"__class__": 1}}',
    b'{"task": "add", "args": ' + b"[1," * 1 + b"1]" + b', "kwargs": {"a": 1}}',
]


@pytest.mark.parametrize("path", ["/jobs", "/jobs:batch", "/jobs:cancel", "/broadcasts", "/bindings:release"])
async def test_hostile_bodies_are_refused(http: httpx.AsyncClient, app: Fairlane, path: str) -> None:
    for body in BODIES:
        began = time.monotonic()
        # An array is what a batch takes, and an empty one is no mistake.
        sent = b"[" + body + b"]" if path == "/jobs:batch" and body not in (b"", b"[]") else body
        if path == "/jobs:batch" and sent == b"[]":
            continue
        answer = await http.post(f"{API}{path}", content=sent, headers=JSON)
        assert 400 <= answer.status_code < 500, (answer.status_code, sent[:80], answer.text[:200])
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.content) < 2_000, "what was sent is not repeated"
        assert time.monotonic() - began < 20
    assert (await app.client.find()).jobs == ()


async def test_hostile_keys_are_refused_where_they_cannot_be_shown(http: httpx.AsyncClient, app: Fairlane) -> None:
    for field in KEYS:
        for text in STRANGE:
            if text.isprintable() and 0 < len(text) < 200:
                continue
            escaped = text.replace("\r\n", "\\r\\n")
            body = raw(f'{{"task":"add","args":[1],"options":{{"{field}":"{escaped}"}}}}')
            answer = await http.post(f"{API}/jobs", content=body.replace(b"\0", b"\\u0000"), headers=JSON)
            assert 400 <= answer.status_code < 500, (field, text[:20], answer.text[:200])
            assert len(answer.content) < 2_000
    assert (await app.client.find()).jobs == ()


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_wrong_content_types_are_refused(http: httpx.AsyncClient, app: Fairlane) -> None:
    body = b'{"task": "add", "args": [1]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
        assert is_problem(
            await http.post(f"{API}/jobs", content=body, headers={"Content-Type": kind}), 415, "Content-Type"
        )
    assert (
        await http.post(f"{API}/jobs", content=body, headers={"Content-Type": "Application/JSON; charset=utf-8"})
    ).is_success
    assert len((await app.client.find()).jobs) == 1


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_body_that_never_ends_is_cut(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(body_seconds=0.2, body_bytes=10_000))

    async def forever(pause: float, size: int = 100) -> AsyncIterator[bytes]:
        yield b'{"task": "add", "args": ["'
        while True:
            await asyncio.sleep(pause)
            yield b"x" * size

    async with client_of(web) as http:
        for path in ("/jobs", "/jobs:batch"):
            drip = await http.post(f"{API}{path}", content=forever(0.01), headers=JSON)
            assert drip.status_code in (408, 413)
            stalled = await asyncio.wait_for(http.post(f"{API}{path}", content=forever(60), headers=JSON), 30)
            assert is_problem(stalled, 408)
        lines = {"Content-Type": "application/x-ndjson"}
        endless = await http.post(f"{API}/jobs:batch", content=forever(0.001, 9_000), headers=lines)
        assert '"status":413' in endless.text
        stalled = await asyncio.wait_for(http.post(f"{API}/jobs:batch", content=forever(60), headers=lines), 30)
        assert '"status":408' in stalled.text
    assert (await app.client.find()).jobs == ()


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_long_headers_paths_and_queries_are_refused(http: httpx.AsyncClient) -> None:
    assert is_problem(await http.get(f"{API}/jobs", headers={"X-Long": "x" * 20_000}), 431)
    assert is_problem(await http.get(f"{API}/jobs/{'x' * 9_000}"), 414)
    assert is_problem(await http.get(f"{API}/jobs?queue={'x' * 9_000}"), 414)
    assert (await http.get(f"{API}/jobs?" + "&".join(f"a{n}=1" for n in range(200)))).status_code == 400
    assert (await http.get(f"{API}/jobs?queue=%ff")).status_code in (400, 422)
    assert (await http.get(f"{API}/jobs?state=pending&state=failed")).status_code == 422
    key = {"Idempotency-Key": "x" * 300}
    assert is_problem(await http.post(f"{API}/jobs", json=job(), headers=key), 422, "Idempotency-Key")


async def test_hostile_ids_and_names_in_paths_are_not_found(http: httpx.AsyncClient) -> None:
    for name in ("%00", "%0a", "%ff", "%e2%80%ae", "..%2f..", "x" * 300, "%F0%9F%92%A9", "'%22;--"):
        for path in (f"jobs/{name}", f"queues/{name}", f"jobs/{name}/events", f"queues/{name}/lanes"):
            answer = await http.get(f"{API}/{path}")
            assert answer.status_code in (200, 404, 422), (path, answer.text)
            assert answer.status_code != 200 or path.endswith("/lanes")


@pytest.mark.parametrize("piece", [rb"\"", b'"', rb"\\", b"x", b"["])
def test_a_string_without_an_end_takes_time_in_proportion_to_its_length(piece: bytes) -> None:
    # It took sixteen seconds for 64 KB of the first piece, and four times that for twice as much.
    body = b'{"x":[' + b"[]," * 100 + b'0],"y":"' + piece * (1_000_000 // len(piece))
    began = time.process_time()
    check_nesting(body, 64)
    assert time.process_time() - began < 10
