"""What users see of sticky plans besides the router: the example and the command line."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from fairlane.cli.celery_bindings import celery_bindings_command
from tests.integrations.celery.kit import ROOT, CeleryProcess
from tests.servers import valkey
from tests.test_examples import expected_output

EXAMPLE = ROOT / "examples" / "celery_plans" / "plans.py"
MODULE = "examples.celery_plans.plans"
DATABASE = 15
"""A database of the server that no other test uses: the example has no prefix for its keys."""


@pytest.fixture(scope="module")
def ran(url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example has printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRLANE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path_factory.mktemp("example"),
        env=environ | {"REDIS_URL": url},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the example, with its two workers."""
    folder = tmp_path_factory.mktemp("example")
    found = f"{valkey.server().url}/{DATABASE}"
    workers = [
        CeleryProcess(
            *(MODULE, folder / f"{index}.log", "-P", "threads", "-c", "2", "-n", f"w{index}@test"),
            *("--index", str(index), "--without-mingle", "--without-gossip"),
            environ={"REDIS_URL": found},
        )
        for index in (0, 1)
    ]
    try:
        for worker in workers:
            worker.ready()
        yield found
    finally:
        for closing in [threading.Thread(target=worker.close) for worker in workers]:
            closing.start()
        for worker in workers:
            worker.process.wait()


def test_the_example_prints_what_its_first_lines_say(ran: str) -> None:
    assert ran == expected_output(EXAMPLE.read_text())


@pytest.mark.usefixtures("ran")
def test_the_command_shows_bindings(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    monkeypatch.chdir(ROOT)
    run = CliRunner()
    shown = run.invoke(celery_bindings_command, ["-A", MODULE, "--key", "plan-7"])
    assert shown.exit_code == 0, shown.output
    assert "org.worker-0" in shown.output
    assert "released" in shown.output
    document = json.loads(run.invoke(celery_bindings_command, ["-A", MODULE, "--key", "plan-8", "--json"]).output)
    assert (document["org"], [each["index"] for each in document["bindings"]]) == ("org", [1])


def test_an_application_without_a_router_is_named() -> None:
    done = CliRunner().invoke(celery_bindings_command, ["-A", "tests.integrations.celery.sticky.nothing"])
    assert done.exit_code == 2
    assert "--app" in done.output
