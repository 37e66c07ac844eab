"""The stages of the scenarios: one for each kind of deployment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.postgresql import prepare_servers

from .deployment import DEPLOYMENTS, Deployment, MakeDeployment
from .world import TIMES, Stage


@contextlib.contextmanager
def deployments(kind: str) -> Iterator[MakeDeployment]:
    """Creates deployments of a kind, and closes all of them at the end."""
    if kind.startswith("postgresql"):
        # One for each repetition: a server that starts while another repetition measures would spoil its figures.
        prepare_servers(TIMES)
    with contextlib.ExitStack() as made:

        def make(directory: Path) -> Deployment:
            one = DEPLOYMENTS[kind](directory)
            made.callback(one.close)
            return one

        yield make


@pytest.fixture(params=list(DEPLOYMENTS))
def deployment(request: pytest.FixtureRequest) -> Iterator[MakeDeployment]:
    """A kind of deployment."""
    with deployments(request.param) as make:
        yield make


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path, deployment: MakeDeployment) -> Stage:
    """The stage on which a test runs its scenario."""
    return Stage(request.node.name, tmp_path, deployment)


@pytest.fixture
def stages(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Stage]]:
    """A stage of every kind, for a test that mostly waits and so runs on all of them at once."""
    with contextlib.ExitStack() as open_ones:
        yield {
            kind: Stage(f"{request.node.name}[{kind}]", tmp_path / kind, open_ones.enter_context(deployments(kind)))
            for kind in DEPLOYMENTS
        }
