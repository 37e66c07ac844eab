"""Access: every operation names its scope, tokens stay within their bounds, other sites are rejected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from fairlane import Fairlane
from fairlane.http import HttpSettings, create_app, serve_app, service_of, shapes
from fairlane.http.access import Scope
from fairlane.http.operation import Endpoint, Operation
from fairlane.model.tokens import AccessToken, digest_of, make, stored

from .conftest import API, client_of
from .test_jobs import is_problem, send
from .test_operations import fits
from .test_streams import Stream


def token(secret: str, *scopes: str, queues: tuple[str, ...] | None = None, lane: str | None = None) -> AccessToken:
    new, _ = make(secret, scopes, queues=queues, lane_prefix=lane)
    return msgspec.structs.replace(stored(new, 0.0), id=f"id-{secret}", digest=digest_of(secret))


class Tokens:
    """Tokens that a test gives and takes back."""

    def __init__(self, web: FastAPI, *known: AccessToken) -> None:
        self.known = list(known)
        self.reads = 0
        service_of(web).access._read = self.read

    async def read(self) -> Sequence[AccessToken]:
        self.reads += 1
        return list(self.known)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def operations(web: FastAPI) -> list[Operation]:
    found: list[Operation] = []
    for route in web.routes:
        assert isinstance(route, Route), f"{route} is no operation of the table"
        assert isinstance(route.endpoint, Endpoint), f"{route.path} does not check access"
        found += route.endpoint.operations.values()
    return found


def call(http: httpx.AsyncClient, operation: Operation, secret: str | None) -> httpx.Request:
    path = operation.path.replace("{id:path}", "x").replace("{queue}", "default").replace("{id}", "x")
    path = path.replace("{name}", "x")
    headers = {} if secret is None else bearer(secret)
    return http.build_request(operation.method, path, headers=headers)


pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)


async def test_every_route_names_its_scope_and_refuses_callers_without_it(web: FastAPI) -> None:
    scopes = ("read", "enqueue", "operate", "admin")
    Tokens(web, *(token(scope, scope) for scope in scopes))
    public = []
    async with client_of(web) as http:
        for operation in operations(web):
            assert isinstance(operation.scope, Scope)
            if operation.scope is Scope.PUBLIC:
                public.append(operation.path)
                continue
            assert (await http.send(call(http, operation, None))).status_code == 401, operation.path
            assert (await http.send(call(http, operation, "wrong"))).status_code == 401, operation.path
            for scope in scopes:
                if scope in (operation.scope, "admin") or (scope == "operate" and operation.scope is Scope.READ):
                    continue
                assert (await http.send(call(http, operation, scope))).status_code == 403, (operation.path, scope)
    # The dashboard's files contain no data, and a session says only what its caller may do.
    session = [f"{API}/session"] * 3
    assert sorted(public) == ["/", f"{API}/openapi.json", *session, "/assets/{file}", "/healthz", "/readyz"]


async def test_only_the_old_route_changes_anything_by_get(web: FastAPI) -> None:
    for operation in operations(web):
        if operation.scope in (Scope.ENQUEUE, Scope.OPERATE, Scope.ADMIN) and not operation.path.startswith("/task"):
            assert operation.method != "GET", operation.path


async def test_a_bound_token_is_refused_by_whatever_is_about_the_whole_system(web: FastAPI) -> None:
    Tokens(web, token("bound", "operate", "enqueue", queues=("default",)))
    async with client_of(web) as http:
        for operation in operations(web):
            if not operation.bound:
                answer = await http.send(call(http, operation, "bound"))
                assert answer.status_code == 403, operation.path


async def test_a_tenant_sends_to_and_sees_its_own_lane_alone(web: FastAPI, http: httpx.AsyncClient) -> None:
    foreign = await send(http, "render", "bob")
    mixed = await send(http, "add", 1, lane="user:anna")
    service_of(web).access._read_at = float("-inf")
    Tokens(web, token("ann", "operate", "enqueue", queues=("default",), lane="user:ann"))
    async with client_of(web, headers=bearer("ann")) as ann:
        own = await send(ann, "render", "ann")
        refused = await ann.post(f"{API}/jobs", json={"task": "render", "args": ["bob"]})
        assert is_problem(refused, 403, "lane")
        assert refused.json()["detail"] == "this token is bound to lane 'user:ann'"
        assert is_problem(await ann.post(f"{API}/jobs", json={"task": "render", "args": ["anna"]}), 403, "lane")
        assert is_problem(await ann.post(f"{API}/jobs", json={"task": "add", "args": [1]}), 403, "lane")
        other = {"task": "render", "args": ["ann"], "options": {"queue": "other"}}
        assert is_problem(await ann.post(f"{API}/jobs", json=other), 403, "queue")
        assert is_problem(await ann.post(f"{API}/jobs:batch", json=[other]), 403, "[0].queue")
        for hidden in (foreign, mixed):
            for path in ("", "/result", "/events"):
                assert is_problem(await ann.get(f"{API}/jobs/{hidden}{path}"), 404)
            assert is_problem(await ann.post(f"{API}/jobs/{hidden}/cancel"), 404)
            assert is_problem(await ann.post(f"{API}/jobs/{hidden}/retry"), 404)
        unnamed = await ann.get(f"{API}/jobs")
        assert is_problem(unnamed, 403, "queue")
        assert "a queue and one of its lanes" in unnamed.json()["detail"]
        assert is_problem(await ann.get(f"{API}/jobs", params={"queue": "default"}), 403, "lane")
        listed = await ann.get(f"{API}/jobs", params={"queue": "default", "lane": "user:ann"})
        assert [job["id"] for job in listed.json()["jobs"]] == [own]
        assert is_problem(await ann.post(f"{API}/jobs:cancel", json={"all": True}), 403, "queue")
        assert is_problem(await ann.post(f"{API}/queues/default/pause"), 403, "lane")
        assert is_problem(await ann.get(f"{API}/queues/default"), 403, "lane")
        assert (await ann.get(f"{API}/queues")).json() == {"queues": []}
        assert (await ann.get(f"{API}/jobs/{own}")).json()["position"]["place"] == 1
        taken = {"task": "add", "args": [1], "options": {"lane": "user:ann", "unique": "u"}}
        assert (await ann.post(f"{API}/jobs", json=taken)).status_code == 202
    async with client_of(web, headers=bearer("bob")) as bob:
        Tokens(web, token("bob", "enqueue", lane="user:bob"))
        service_of(web).access._read_at = float("-inf")
        taken["options"] = {"lane": "user:bob", "unique": "u"}
        assert is_problem(await bob.post(f"{API}/jobs", json=taken), 409, "options.unique")
        assert is_problem(await bob.post(f"{API}/jobs:batch", json=[taken]), 409, "[0].options.unique")
        lines = {"Content-Type": "application/x-ndjson"}
        line = await bob.post(f"{API}/jobs:batch", content=msgspec.json.encode(taken), headers=lines)
        assert line.json()["problem"]["status"] == 409
        assert "id" not in line.json()


async def test_a_token_bound_to_a_lane_sees_that_lane_alone(web: FastAPI, app: Fairlane) -> None:
    await app.registry.find("add").enqueue(1)
    await app.client.set_limit("default", 7, lane="user:bob")
    Tokens(web, token("ann", "operate", queues=("default",), lane="user:ann"), token("all", "operate"))
    async with client_of(web, headers=bearer("ann")) as ann:
        for method, verb, body in (
            ("PUT", "limit", {"limit": 3}),
            ("POST", "pause", {}),
            ("POST", "resume", {}),
            ("POST", "clear-limit", {}),
        ):
            answer = await ann.request(method, f"{API}/queues/default/{verb}", json={"lane": "user:ann", **body})
            assert answer.status_code == 200, answer.text
            assert fits(shapes.SteeredLane, answer.json()), verb
            assert "bob" not in answer.text
            if verb == "pause":
                assert (answer.json()["limit"], answer.json()["own_limit"]) == (0, 3)
    async with client_of(web, headers=bearer("all")) as whole:
        answer = await whole.post(f"{API}/queues/default/pause", json={"lane": "user:ann"})
        assert "user:bob" in answer.text


async def test_a_hidden_job_is_answered_like_one_that_does_not_exist(app: Fairlane) -> None:
    web = serve_app(app, legacy_task="boom", workers=0)
    hidden = (await app.registry.find("add").options(id="hidden-1").enqueue(1)).id
    Tokens(web, token("bob", "operate", "read", queues=("elsewhere",)))
    async with client_of(web, headers=bearer("bob")) as bob:
        for method, path in (
            *(("GET", f"{API}/jobs/{{}}{rest}") for rest in ("", "/result", "/events")),
            *(("POST", f"{API}/jobs/{{}}/{verb}") for verb in ("cancel", "retry")),
            ("GET", "/task/{}"),
        ):
            answers = [await bob.request(method, path.format(id)) for id in (hidden, "absent-1")]
            assert [answer.status_code for answer in answers] == [404, 404], path
            texts = [answer.text.replace(id, "…") for answer, id in zip(answers, (hidden, "absent-1"), strict=True)]
            assert texts[0] == texts[1], path


async def test_keys_of_one_token_are_not_those_of_another(web: FastAPI, app: Fairlane) -> None:
    Tokens(web, token("a", "enqueue"), token("b", "enqueue"))
    async with client_of(web) as http:
        ids = set()
        for secret in ("a", "b"):
            headers = bearer(secret) | {"Idempotency-Key": "1"}
            answer = await http.post(f"{API}/jobs", json={"task": "add", "args": [1]}, headers=headers)
            ids.add(answer.json()["id"])
    assert len(ids) == 2


async def test_a_revoked_token_ends_and_the_service_stays_closed(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(token_seconds=0.05))
    tokens = Tokens(web, token("a", "read"))
    async with client_of(web) as http:
        for _ in range(20):
            assert (await http.get(f"{API}/tasks", headers=bearer("a"))).status_code == 200
        assert tokens.reads <= 3
        tokens.known = [msgspec.structs.replace(tokens.known[0], revoked_at=1.0)]
        service_of(web).access._read_at -= 0.1
        assert is_problem(await http.get(f"{API}/tasks", headers=bearer("a")), 401)
        tokens.known = []
        service_of(web).access._read_at -= 0.1
        assert is_problem(await http.get(f"{API}/tasks"), 401)


async def test_a_stream_ends_with_its_token(web: FastAPI, app: Fairlane) -> None:
    handle = await app.registry.find("add").enqueue(1)
    tokens = Tokens(web, token("a", "read"), token("b", "read"))
    path = f"{API}/jobs/{handle.id}/events"
    async with (
        Stream(web, path, authorization="Bearer a") as revoked,
        Stream(web, path, authorization="Bearer b") as kept,
    ):
        parts, others = revoked.parts(), kept.parts()
        assert ["event: state" in await anext(parts) for _ in range(2)] == [False, True]
        tokens.known = tokens.known[1:]
        async with asyncio.timeout(30):
            assert [part async for part in parts if not part.startswith(":")] == []
        assert ["event: state" in await anext(others) for _ in range(2)] == [False, True]
        assert await anext(others) == ": alive\n\n"
        await handle.cancel()
        async with asyncio.timeout(30):
            assert any([b"cancelled" in part.encode() async for part in others])


async def test_a_stream_that_needed_no_token_ends_once_there_is_one(web: FastAPI, app: Fairlane) -> None:
    handle = await app.registry.find("add").enqueue(1)
    async with Stream(web, f"{API}/jobs/{handle.id}/events") as stream:
        parts = stream.parts()
        assert ["event: state" in await anext(parts) for _ in range(2)] == [False, True]
        assert await anext(parts) == ": alive\n\n"
        await app.client.make_token("first", ["read"])
        async with asyncio.timeout(30):
            assert [part async for part in parts if not part.startswith(":")] == []


async def test_a_long_poll_returns_nothing_to_a_revoked_token(web: FastAPI, app: Fairlane) -> None:
    handle = await app.registry.find("add").enqueue(1)
    tokens = Tokens(web, token("a", "read"))
    async with client_of(web, headers=bearer("a")) as http:
        poll = asyncio.create_task(http.get(f"{API}/jobs/{handle.id}/result", params={"wait": 20}))
        await asyncio.sleep(0.1)
        tokens.known = []
        await handle.cancel()
        assert is_problem(await asyncio.wait_for(poll, 30), 401)


async def test_without_tokens_only_this_machine_is_answered(web: FastAPI, app: Fairlane) -> None:
    async with client_of(web) as http:
        assert (await http.get(f"{API}/queues")).status_code == 200
        assert is_problem(await http.get(f"{API}/queues", headers={"Host": "evil.example"}), 401)
        assert is_problem(await http.get(f"{API}/queues", headers={"X-Forwarded-For": "10.0.0.1"}), 401)
    elsewhere = httpx.ASGITransport(web, client=("10.0.0.9", 1))
    async with httpx.AsyncClient(transport=elsewhere, base_url="http://localhost") as http:
        answer = await http.get(f"{API}/queues")
        assert is_problem(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await http.get("/healthz")).status_code == 200
    closed = create_app(app, settings=HttpSettings(access="tokens"))
    async with client_of(closed) as http:
        assert is_problem(await http.get(f"{API}/queues"), 401)


async def test_other_hosts_and_origins_are_refused(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(hosts=("localhost",), origins=("https://shop.example",)))
    async with client_of(web) as http:
        assert is_problem(await http.get("/healthz", headers={"Host": "evil.example"}), 421, "Host")
        assert (await http.get("/healthz", headers={"Host": "LOCALHOST:8000"})).status_code == 200
        for origin in ("https://evil.example", "null", "http://localhost:9"):
            answer = await http.post(f"{API}/jobs", json={"task": "add", "args": [1]}, headers={"Origin": origin})
            assert is_problem(answer, 403, "Origin")
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        assert is_problem(await http.get(f"{API}/queues", headers=image), 403, "Origin")
        assert (await app.client.find()).jobs == ()
        for origin in ("https://shop.example", "http://localhost"):
            answer = await http.get(f"{API}/queues", headers={"Origin": origin})
            assert answer.status_code == 200
        allowed = await http.get(f"{API}/queues", headers={"Origin": "https://shop.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://shop.example"


async def test_a_link_on_another_site_changes_nothing(app: Fairlane) -> None:
    web = serve_app(app, legacy_task="boom", workers=0)
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    async with client_of(web) as http:
        assert is_problem(await http.get("/task", headers=followed), 403, "Origin")
        assert (await app.client.find()).jobs == ()
        # A link to what only shows something works, and so does a request that no page has sent.
        assert (await http.get("/", headers=followed)).status_code == 200
        assert (await http.get("/task")).status_code == 200


async def test_tokens_of_the_store_open_the_service(app: Fairlane, web: FastAPI) -> None:
    made, secret = await app.client.make_token("ci", ["enqueue"], lane_prefix="user:")
    async with client_of(web, headers=bearer(secret)) as http:
        assert (await http.post(f"{API}/jobs", json={"task": "render", "args": ["ann"]})).status_code == 202
        assert is_problem(await http.get(f"{API}/tasks"), 403)
        await app.client.revoke_token(made.id)
        await asyncio.sleep(0.01)
        assert is_problem(await http.post(f"{API}/jobs", json={"task": "render", "args": ["ann"]}), 401)
