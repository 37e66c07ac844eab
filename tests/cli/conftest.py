"""A directory for the command line to work in."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.project import SHOP, Project

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The current directory, with a module `shop` and a store; modules imported from it are forgotten afterwards."""
    for name in os.environ:
        if name.startswith("FAIRLANE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    made = Project(tmp_path)
    made.write("shop.py", SHOP)
    made.make_store()
    yield made
    made.clear()
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.is_relative_to(tmp_path) or file.is_relative_to(EXAMPLES):
            del sys.modules[name]


@pytest.fixture
def every_store(store_url: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on a store of every kind, named by the environment. Otherwise a file in the directory will do."""
    monkeypatch.setenv("FAIRLANE_URL", store_url)
    project.url = store_url
    project.make_store()
