"""The stage of the scenarios, once for every kind of deployment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.postgresql import prepare_servers

from .deployment import DEPLOYMENTS, Deployment, MakeDeployment
from .world import Stage

AT_ONCE = 5
"""Repetitions that play at once. A server that starts while another repetition measures would spoil its figures."""


@pytest.fixture(params=list(DEPLOYMENTS))
def deployment(request: pytest.FixtureRequest) -> Iterator[MakeDeployment]:
    """A kind of deployment. All that a test makes are closed when it ends."""
    if request.param == "postgresql":
        prepare_servers(AT_ONCE)
    with contextlib.ExitStack() as made:

        def make(directory: Path) -> Deployment:
            one = DEPLOYMENTS[request.param](directory)
            made.callback(one.close)
            return one

        yield make


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path, deployment: MakeDeployment) -> Stage:
    """Where a test plays."""
    return Stage(request.node.name, tmp_path, deployment)
