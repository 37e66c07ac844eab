"""The stage of the scenarios, once for every kind of deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from .deployment import DEPLOYMENTS, MakeDeployment
from .world import Stage


@pytest.fixture(params=list(DEPLOYMENTS))
def deployment(request: pytest.FixtureRequest) -> MakeDeployment:
    """A kind of deployment."""
    return DEPLOYMENTS[request.param]


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path, deployment: MakeDeployment) -> Stage:
    """Where a test plays."""
    return Stage(request.node.name, tmp_path, deployment)
