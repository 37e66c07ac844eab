"""The command line, the metrics and the example of balanced mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import prometheus_client
import pytest
from click.testing import CliRunner

from fairlane.cli.main import fairlane
from fairlane.errors import StoreUnavailable
from fairlane.integrations.prometheus import CeleryLoads
from tests.servers.valkey import own_server, server
from tests.test_examples import EXAMPLES, expected_output

from . import application
from .fleet import Fleet

MakeFleet = Callable[..., Fleet]


def test_the_command_line_shows_recounts_and_diagnoses(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(2)
    for _ in range(3):
        fleet.task("ok").delay()
    monkeypatch.setitem(vars(application), "app", fleet.app)
    name = ("-A", f"{application.__name__}:app")

    def run(*words: str) -> str:
        done = CliRunner().invoke(fairlane, ["celery", *words])
        assert done.exit_code == 0, done.output
        return done.output

    expected = {"queue_0": {"pending": 2, "running": 0}, "queue_1": {"pending": 1, "running": 0}}
    assert json.loads(run("loads", *name, "--json"))["queues"] == expected
    assert run("loads", *name).split()[-6:] == ["queue_0", "2", "0", "queue_1", "1", "0"]
    fleet.purge()
    assert json.loads(run("reset", "queue_1", *name, "--json"))["queues"]["queue_1"]["pending"] == 0
    assert fleet.total() == (2, 0)
    run("reset", *name)
    assert fleet.total() == (0, 0)
    assert [finding["level"] for finding in json.loads(run("doctor", *name, "--json"))["findings"]] == [
        *("ok", "ok", "warn", "ok")
    ]
    assert "no live worker" in run("doctor", *name)
    unknown = CliRunner().invoke(fairlane, ["celery", "reset", "queue_2", *name])
    assert unknown.exit_code == 1
    assert "queue_2" in unknown.output
    assert "fairlane jobs" not in unknown.output
    missing = CliRunner().invoke(fairlane, ["celery", "loads", "-A", "no_such_module"])
    assert missing.exit_code == 2


def test_the_doctor_names_what_is_not_counted(make_fleet: MakeFleet) -> None:
    """A recount does not change it: the message of a revoked task stays in its queue until its turn."""
    fleet = make_fleet(1)
    fleet.task("ok").delay().revoke()
    fleet.balancer.reset()
    [finding] = [each for each in fleet.balancer.diagnose() if each.topic == "counts"]
    assert "more messages than are counted in queue_0" in finding.what
    assert "revoked and expired tasks are not counted" in str(finding.advice)


MODULES = {
    "shop": "import celery, fairlane\napp = fairlane.Fairlane('sqlite:///shop.db')\ncelery_app = celery.Celery('shop')",
    "broken": "raise AttributeError('its own error')",
    "unfinished": "import no_such_library",
    "empty": "app = None",
}


@pytest.mark.parametrize("command", ["loads", "reset", "doctor", "bindings"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shop", "'shop' is of type Fairlane, not a Celery application; use -A shop:celery_app"),
        ("shop:app", "'shop:app' is of type Fairlane, not a Celery application; use -A shop:celery_app"),
        ("shop:nothing", "no Celery application 'shop:nothing'; use -A shop:celery_app"),
        ("missing:app", "run the command from the project's directory"),
        ("broken:app", "AttributeError: its own error"),
        ("unfinished:app", "No module named 'no_such_library'"),
        ("empty:nothing", "no Celery application 'empty:nothing'; give -A module:app"),
        ("./shop.py:app", "'./shop.py' is not a module; give -A module:app"),
    ],
)
def test_a_name_of_no_celery_application_is_explained(
    command: str, name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, source in MODULES.items():
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    try:
        done = CliRunner().invoke(fairlane, ["celery", command, "-A", name])
    finally:
        for module in MODULES:
            sys.modules.pop(module, None)
    assert sentence in done.output
    assert isinstance(done.exception, SystemExit)  # not a traceback


def test_a_server_that_is_down_is_the_matter_of_its_own_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import Celery

    from fairlane.integrations.celery import LoadBalancer

    app = Celery("uncounted", broker="memory://")
    balancer = LoadBalancer(app, "redis://127.0.0.1:1")
    monkeypatch.setitem(vars(application), "app", app)
    done = CliRunner().invoke(fairlane, ["celery", "loads", "-A", f"{application.__name__}:app"])
    assert done.exit_code == 1
    assert "fairlane celery doctor" in done.output
    assert "no job is lost" not in done.output
    balancer.close()
    app.close()


def test_a_recount_without_a_broker_is_one_sentence() -> None:
    from celery import Celery

    from fairlane.integrations.celery import LoadBalancer

    app = Celery("cut off", broker="redis://:its-password@127.0.0.1:1")
    balancer = LoadBalancer(app, server().url, namespace="cut-off")
    with pytest.raises(StoreUnavailable, match="the broker of 'cut off' cannot be read") as failed:
        balancer.reset()
    assert "its-password" not in str(failed.value)
    balancer.close()
    app.close()


def test_loads_are_metrics(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    fleet.task("ok").delay()
    registry = prometheus_client.CollectorRegistry()
    registry.register(CeleryLoads(fleet.balancer.loads))
    tasks = "fairlane_celery_tasks"
    assert registry.get_sample_value(tasks, {"queue": "queue_0", "state": "pending"}) == 1
    assert registry.get_sample_value(tasks, {"queue": "queue_1", "state": "running"}) == 0
    assert registry.get_sample_value("fairlane_celery_balancer_up") == 1


def test_metrics_of_a_server_that_is_down() -> None:
    def fails() -> dict[str, CeleryLoads]:
        raise StoreUnavailable("down")

    registry = prometheus_client.CollectorRegistry()
    registry.register(CeleryLoads(fails))  # type: ignore[arg-type]  # a stand-in
    assert registry.get_sample_value("fairlane_celery_balancer_up") == 0


def test_the_example_prints_what_its_first_lines_say() -> None:
    path = EXAMPLES / "celery_images" / "images.py"
    source = path.read_text()
    assert "\npython examples/celery_images/images.py\n" in source
    with own_server() as mine:
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "REDIS_URL": mine.url},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_output(source)


def test_no_secret_is_shown(tmp_path: Path) -> None:
    from celery import Celery

    from fairlane.integrations.celery import LoadBalancer

    url = server().url.replace("redis://", "redis://:not-its-password@")
    balancer = LoadBalancer(Celery("secret", broker="memory://"), url)
    with pytest.raises(StoreUnavailable) as refused:
        balancer.loads()
    assert "not-its-password" not in str(refused.value)
    assert "not-its-password" not in repr(balancer._store.address)
    assert "not-its-password" not in str(balancer.diagnose())
    balancer.close()
