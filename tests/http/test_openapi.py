"""The OpenAPI document: every operation with an example that fits, and a service that keeps to it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
import uvicorn
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from fairlane.http import HttpSettings, create_app
from tests.sizes import FULL, sized

from .conftest import API, client_of, make_app
from .test_access import operations

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
EXAMPLES = sized(4, 100)


async def test_every_operation_is_documented_with_an_example_that_fits(web: FastAPI) -> None:
    document = web.openapi()
    assert document["openapi"] == "3.1.0"
    names = set()
    for operation in operations(web):
        path = operation.path.replace("{id:path}", "{id}")
        told = document["paths"][path][operation.method.lower()]
        names.add(told["operationId"])
        assert told["summary"], path
        assert operation.shows is not None, f"{path} shows no example of its answer"
        if operation.answer is not None:
            msgspec.convert(operation.shows, operation.answer)
        if operation.body is not None:
            assert operation.example is not None, f"{path} has no example of its body"
            msgspec.convert(operation.example, operation.body)
    assert len(names) == len(operations(web))


@pytest.fixture
def served(store_url: str) -> Iterator[str]:
    """A service in a thread; the paths that stream are left out, because a stream does not end."""
    app = make_app(store_url)
    web = create_app(app, settings=HttpSettings(signals=False, longest_wait=0.1))
    server = uvicorn.Server(uvicorn.Config(web, port=0, log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.mark.timeout(sized(120, 1_800))
def test_the_service_keeps_its_contract(served: str, store_url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served}{API}/openapi.json").exclude(path_regex="/events$")
    statuses: dict[str, Counter[int]] = {}
    app = make_app(store_url)
    with app.blocking as client:
        _, secret = client.make_token("contract", ["admin"])
        # Otherwise a made-up token is sent, and every answer is a 401.
        headers = {"Authorization": f"Bearer {secret}"}
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            waiting, ended = (app.registry.find("add").blocking.enqueue(1) for _ in range(2))
            ended.cancel()
            ids = itertools.cycle([ended.id, waiting.id])
            statuses[f"{operation.method} {operation.path}"] = answers_of(operation, served, headers, ids)
    assert len(statuses) > 25
    assert not [name for name, seen in statuses.items() if seen[401] or seen[403]], statuses
    if FULL:  # a few examples may all be refused
        assert not [name for name, seen in statuses.items() if not any(200 <= each < 300 for each in seen)], statuses


def answers_of(operation: Any, base: str, headers: dict[str, str], ids: Iterator[str]) -> Counter[int]:
    """Call an operation in many ways, each of which must keep the contract. Returns how often each status came."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=operation.as_strategy())
    def holds(case: Any) -> None:
        for named in (False, True):
            if named:
                name_what_exists(case, ids)
            # A schema cannot express which names exist, so data that matches it may be rejected.
            answer = case.call_and_validate(
                base_url=base, headers=headers, timeout=10, excluded_checks=[positive_data_acceptance]
            )
            seen[answer.status_code] += 1

    holds()
    return seen


def name_what_exists(case: Any, ids: Iterator[str]) -> None:
    """Put names of this application in place of made-up ones, and leave the rest."""
    if "id" in case.path_parameters:
        case.path_parameters["id"] = next(ids)
    if "queue" in case.path_parameters:
        case.path_parameters["queue"] = "pictures"
    if case.operation.path.endswith(("/jobs:cancel", "/jobs:retry", "/jobs:purge")):
        case.body = {"queue": "pictures"}
    for each in case.body if isinstance(case.body, list) else [case.body]:
        if isinstance(each, dict) and "task" in each:
            each |= {"task": "add", "args": [1], "kwargs": {}}


@settings(max_examples=3 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=200))
def test_any_bytes_are_answered(store_url: str, body: bytes) -> None:
    web = create_app(make_app(store_url), settings=HttpSettings(access="open"))

    async def send() -> int:
        async with client_of(web) as http:
            answer = await http.post(f"{API}/jobs", content=body, headers={"Content-Type": "application/json"})
            return answer.status_code

    assert asyncio.run(send()) in (400, 422)
