"""Signing in: what the cookie contains, which requests may use it, and from where."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from fairlane.http import HttpSettings, service_of, view_shapes

from .conftest import API, client_of
from .test_access import Tokens, token
from .test_jobs import is_problem
from .test_operations import fits

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
HERE = {"Origin": "http://localhost"}


@pytest.fixture
async def signed_in(web: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that signed in with a token that may operate."""
    Tokens(web, token("boss", "operate"))
    async with client_of(web) as browser:
        answer = await browser.post(f"{API}/session", json={"token": "boss"}, headers=HERE)
        assert answer.status_code == 200
        assert fits(view_shapes.SessionView, answer.json())
        yield browser


async def test_the_cookie_is_for_this_service_alone_and_lasts_an_hour(web: FastAPI) -> None:
    Tokens(web, token("boss", "operate"))
    async with client_of(web) as http:
        answer = await http.post(f"{API}/session", json={"token": " boss "})
        cookie = answer.headers["set-cookie"]
        assert cookie == "fairlane_token=boss; Path=/; Max-Age=3600; HttpOnly; SameSite=Strict"
        behind = await http.post(f"{API}/session", json={"token": "boss"}, headers={"X-Forwarded-Proto": "https"})
        assert behind.headers["set-cookie"].startswith("fairlane_token=boss; Path=/;")
        assert behind.headers["set-cookie"].endswith("; Secure")
        assert is_problem(await http.post(f"{API}/session", json={"token": "guess"}), 422, "token")
        assert is_problem(await http.post(f"{API}/session", json={}), 422, "token")


async def test_two_services_of_one_host_have_a_cookie_each(web: FastAPI) -> None:
    Tokens(web, token("boss", "operate"))
    async with client_of(web) as http:
        one = {"Host": "localhost:8000"}
        answer = await http.post(f"{API}/session", json={"token": "boss"}, headers=one)
        assert answer.headers["set-cookie"].startswith("fairlane_token_8000=boss; ")
        http.cookies.clear()
        for sent, host, told in (
            ("fairlane_token_8000=boss", "localhost:8000", 200),
            ("fairlane_token_8000=boss", "localhost:8001", 401),
            ("fairlane_token_8000=boss; fairlane_token_8000=guess", "localhost:8000", 200),
            ("fairlane_token=boss", "[::1]", 200),
        ):
            found = await http.get(f"{API}/queues", headers={"Host": host, "Cookie": sent})
            assert found.status_code == told, (sent, host)


async def test_guesses_of_a_token_do_not_read_the_store(web: FastAPI) -> None:
    tokens = Tokens(web, token("boss", "operate"))
    service_of(web).access._settings = HttpSettings(token_seconds=60)
    async with client_of(web) as http:
        for _ in range(5):
            assert is_problem(await http.post(f"{API}/session", json={"token": "guess"}), 422, "token")
    # The first finds that the list is not stale and may be new all the same; the others come too soon.
    assert tokens.reads <= 3


async def test_a_token_that_was_just_made_signs_in(web: FastAPI) -> None:
    access = service_of(web).access
    access._settings = HttpSettings(token_seconds=60)
    tokens = Tokens(web, token("boss", "operate"))
    async with client_of(web) as http:
        assert (await http.post(f"{API}/session", json={"token": "boss"})).status_code == 200
        tokens.known = [*tokens.known, token("new", "read")]
        assert (await http.post(f"{API}/session", json={"token": "new"})).status_code == 200


async def test_the_cookie_stands_for_the_token(signed_in: httpx.AsyncClient, web: FastAPI) -> None:
    told = (await signed_in.get(f"{API}/session")).json()
    assert (told["scopes"], told["cookie"], told["bound"]) == (["read", "operate"], True, False)
    assert (await signed_in.post(f"{API}/queues/pictures/pause", headers=HERE)).status_code == 200
    assert is_problem(await signed_in.post(f"{API}/jobs", json={"task": "add"}, headers=HERE), 403)
    # A header that is sent beside it counts, and nothing falls back.
    assert is_problem(await signed_in.get(f"{API}/jobs", headers={"Authorization": "Bearer wrong"}), 401)
    Tokens(web, token("other", "read"))  # it was revoked
    await service_of(web).access.refresh()
    assert is_problem(await signed_in.get(f"{API}/jobs"), 401)


async def test_no_other_page_uses_the_cookie(signed_in: httpx.AsyncClient, web: FastAPI) -> None:
    # Pages of this origin may call, with a token of their own.
    service_of(web).settings = type(service_of(web).settings)(origins=("http://shop.example",))
    foreign = [
        {"Origin": "http://shop.example"},
        {"Origin": "http://localhost:81"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
    ]
    for headers in foreign:
        answer = await signed_in.post(f"{API}/queues/pictures/pause", headers=headers)
        assert answer.status_code in (401, 403), headers


async def test_signing_out_removes_the_cookie(signed_in: httpx.AsyncClient) -> None:
    assert (await signed_in.delete(f"{API}/session", headers=HERE)).status_code == 200
    assert is_problem(await signed_in.get(f"{API}/session"), 401)
    assert is_problem(await signed_in.get(f"{API}/queues"), 401)


async def test_this_machine_needs_no_session_while_there_is_no_token(http: httpx.AsyncClient) -> None:
    told = (await http.get(f"{API}/session")).json()
    assert (told["caller"], told["cookie"]) == ("local", False)
    assert told["scopes"] == ["read", "enqueue", "operate", "admin"]


async def test_the_pages_are_for_everybody_and_contain_no_data(web: FastAPI) -> None:
    Tokens(web, token("boss", "operate"))
    async with client_of(web) as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        name = page.text.partition('src="./')[2].partition('"')[0]
        script = await http.get(f"/{name}")
        assert "immutable" in script.headers["cache-control"]
        assert script.headers["content-encoding"] == "gzip"
        assert is_problem(await http.get("/assets/missing.js"), 404)
        assert is_problem(await http.get("/assets/..%2Findex.html"), 404)
