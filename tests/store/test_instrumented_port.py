"""The wrapper at the port has the verbs of the port, with the same arguments, and imports nothing it does not need."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from fairlane.events import Events
from fairlane.store import open_store
from fairlane.store.instrumented import InstrumentedStore
from fairlane.store.port import Store
from tests.conformance.test_every_verb import PROPERTIES, verbs_of

VERBS = verbs_of(Store) - PROPERTIES
CAPABILITIES = {"counters", "findings", "on_data_loss", "transactions"}
"""What a store may offer beyond the port; the wrapper forwards it."""


class Recording:
    """Records its calls by the names of the port, and always returns the same answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.answer = object()

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[object]]:
        async def call(*args: Any, **options: Any) -> object:
            bound = inspect.signature(getattr(Store, verb)).bind(self, *args, **options)
            self.calls.append((verb, {name: value for name, value in bound.arguments.items() if name != "self"}))
            return self.answer

        return call


def test_it_has_exactly_the_verbs_of_the_port() -> None:
    assert verbs_of(InstrumentedStore) - PROPERTIES - CAPABILITIES == VERBS
    assert isinstance(InstrumentedStore.wakeups, property)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_verb_has_the_signature_of_the_port(verb: str) -> None:
    assert inspect.signature(getattr(InstrumentedStore, verb)) == inspect.signature(getattr(Store, verb))
    assert inspect.iscoroutinefunction(getattr(InstrumentedStore, verb))


@pytest.mark.parametrize("verb", sorted(VERBS))
async def test_a_verb_hands_on_every_argument_and_the_answer(verb: str) -> None:
    signature = inspect.signature(getattr(Store, verb))
    _, *parameters = signature.parameters.values()
    given = {each.name: object() for each in parameters}
    positional = [given[each.name] for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = {each.name: given[each.name] for each in parameters if each.kind is each.KEYWORD_ONLY}
    inner = Recording()

    answer = await getattr(InstrumentedStore(cast("Store", inner), Events()), verb)(*positional, **named)

    assert inner.calls == [(verb, given)]
    assert answer is (None if signature.return_annotation == "None" else inner.answer)


async def test_what_a_store_has_beyond_the_port_stays_reachable(store_url: str) -> None:
    inner = await open_store(store_url)
    events = Events()
    store = InstrumentedStore(inner, events)
    try:
        assert store.inner is inner
        assert store.wakeups is inner.wakeups
        assert store.events is events
    finally:
        await store.close()


def test_importing_fairlane_needs_neither_metrics_nor_traces() -> None:
    code = "import fairlane, fairlane.events, fairlane.store.instrumented, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert not {name for name in modules if name.partition(".")[0] in ("prometheus_client", "opentelemetry")}
