"""The pytest plugin in a project that has Fairlane installed: found automatically, without effect until it is used."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

SHOP = """
from fairlane import Fairlane
app = Fairlane("sqlite:////nowhere/at/all.db")
sent = []

@app.task
def send_mail(address: str) -> None:
    sent.append(address)

@app.task
async def welcome(address: str) -> None:
    await send_mail.enqueue(address)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with an application and two tasks."""
    pytester.makepyfile(shop=SHOP)
    # The second line as in our own pyproject.toml: sqlite3 of Python 3.12.0 to 3.12.3.
    ignored = "ignore:Binding .* is a named parameter:DeprecationWarning"
    pytester.makeini(f"[pytest]\nanyio_mode = auto\nfilterwarnings =\n    error\n    {ignored}\n")
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def anyio_backend():
            return "asyncio"
        """
    )
    return pytester


def test_the_fixture_serves_tests_with_and_without_an_event_loop(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from unittest.mock import call
        import shop

        def test_plain(fairlane_lab):
            lab = fairlane_lab(shop.app).blocking
            shop.welcome.blocking.enqueue("ann@x")
            assert lab.drain().completed == 2
            assert lab.enqueued(shop.send_mail) == [call("ann@x")]

        async def test_async(fairlane_lab):
            lab = fairlane_lab(shop.app)
            assert await lab.jobs() == []
            await shop.welcome.enqueue("bob@x")
            assert (await lab.drain()).completed == 2
            assert await lab.enqueued(shop.send_mail) == [call("bob@x")]

        def test_a_fixture_of_the_project(fairlane_lab, lab):
            shop.send_mail.blocking.enqueue("cat@x")
            lab.clock.advance(5)
            lab.drain()
            assert shop.sent[-1] == "cat@x"
        """
    )
    project.makeconftest(
        """
        import pytest
        import shop

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @pytest.fixture
        def lab(fairlane_lab):
            return fairlane_lab(shop.app).blocking
        """
    )
    project.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=3)


def test_a_job_that_raises_is_shown_with_its_own_lines(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from fairlane import Fairlane
        app = Fairlane("sqlite:////nowhere/at/all.db")

        @app.task
        def charge(amount: int) -> None:
            raise ValueError(f"{amount} is not an amount")  # the culprit

        def test_charge(fairlane_lab):
            lab = fairlane_lab(app).blocking
            charge.blocking.enqueue(-1)
            lab.drain(errors="raise")
        """
    )
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*# the culprit", "*ValueError: -1 is not an amount", "*in job * of task *charge*"])


def test_a_failed_test_leaves_the_application_as_it_was(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import shop

        def test_fails(fairlane_lab):
            fairlane_lab(shop.app, workers=2)
            assert shop.app.settings.url != "sqlite:////nowhere/at/all.db"
            assert False

        def test_after():
            assert shop.app.settings.url == "sqlite:////nowhere/at/all.db"
        """
    )
    project.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1, failed=1)


def test_two_applications_have_labs_of_their_own(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from fairlane import Fairlane
        import shop
        other = Fairlane("sqlite:////nowhere/at/all.db")

        @other.task
        def other_work(): ...

        def test_both(fairlane_lab):
            first, second = fairlane_lab(shop.app).blocking, fairlane_lab(other).blocking
            shop.send_mail.blocking.enqueue("ann@x")
            other_work.blocking.enqueue()
            assert len(first.jobs()) == len(second.jobs()) == 1
            assert first.drain().completed == second.drain().completed == 1
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=1)


def test_a_project_that_does_not_ask_notices_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_nothing(request):
            assert "fairlane_lab" not in request.fixturenames
            assert "fairlane.testing" not in sys.modules
        """
    )
    project.runpytest_subprocess("--strict-markers").assert_outcomes(passed=1)
    assert "fairlane" not in project.runpytest_subprocess("--markers").stdout.str()
    shown = project.runpytest_subprocess("--fixtures")
    shown.stdout.fnmatch_lines(["fairlane_lab*", "*Put an application into a lab for this test*"])
