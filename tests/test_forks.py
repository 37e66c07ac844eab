"""Forks are as good as interpreters of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from . import forks
from .forks import Fork

TELLS = "tests.forked"


def test_a_fork_has_its_own_environment_arguments_input_and_output(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("a line\n")
    env = {"PATH": os.environ["PATH"], "NAME": "value"}
    fork = Fork(TELLS, ["tell", "more"], env=env, source=tmp_path / "source", output=tmp_path / "output")
    assert fork.wait() == 0
    told = json.loads((tmp_path / "output").read_text())
    assert told["arguments"] == ["tell", "more"]
    assert told["environ"] == env
    assert told["input"] == "a line\n"
    assert told["session"] == told["pid"] == fork.pid
    assert told["name"] == "__main__"
    assert told["interrupt"] == "default_int_handler"


def test_forks_have_no_random_number_in_common(tmp_path: Path) -> None:
    forks = [Fork(TELLS, output=tmp_path / f"{number}") for number in range(3)]
    assert [fork.wait() for fork in forks] == [0, 0, 0]
    told = [json.loads((tmp_path / f"{number}").read_text()) for number in range(3)]
    # The first half of an id is the time.
    assert len({one["id"][14:] for one in told}) == len({one["random"] for one in told}) == 3


def test_the_exit_of_a_fork_is_reported(tmp_path: Path) -> None:
    assert Fork(TELLS, ["exit", "3"], output=tmp_path / "output").wait() == 3
    assert Fork(TELLS, ["raise"], output=tmp_path / "raised").wait() == 1
    assert "ValueError: as asked" in (tmp_path / "raised").read_text()
    fork = Fork(TELLS, ["sleep"], output=tmp_path / "output")
    assert fork.poll() is None
    fork.send_signal(signal.SIGKILL)
    assert fork.wait() == fork.poll() == -signal.SIGKILL
    fork.send_signal(signal.SIGKILL)


def test_a_number_that_is_used_again_is_that_of_another_program(tmp_path: Path) -> None:
    ended = forks._source()._codes
    numbers = range(1, int(Path("/proc/sys/kernel/pid_max").read_text()) + 1)
    before = dict(ended)
    try:
        ended.update(dict.fromkeys(numbers, -signal.SIGKILL))
        assert Fork(TELLS, ["exit", "3"], output=tmp_path / "output").wait() == 3
    finally:
        for number in numbers:
            ended.pop(number, None)
        ended.update(before)
