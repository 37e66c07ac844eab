"""Testing: run the jobs that your code sends inside a test, on a temporary store with a clock that the test moves.

pytest examples/test_signup.py
"""

from fairlane import Fairlane
from fairlane.integrations.pytest import MakeLab

app = Fairlane()
outbox: list[str] = []


@app.task
def send_mail(address: str, subject: str) -> None:
    """Send a mail."""
    outbox.append(f"{subject} {address}")


def sign_up(address: str) -> None:
    """The code under test: it sends a mail now and another one tomorrow."""
    send_mail.blocking.enqueue(address, "welcome")
    send_mail.options(delay=86_400).blocking.enqueue(address, "still there?")


def test_a_sign_up_sends_two_mails(fairlane_lab: MakeLab) -> None:
    """The fixture comes with the package."""
    lab = fairlane_lab(app).blocking
    sign_up("ann@example.org")
    assert lab.drain().completed == 1
    assert outbox == ["welcome ann@example.org"]
    lab.clock.advance(86_400)
    assert lab.drain().completed == 1
    assert outbox[1:] == ["still there? ann@example.org"]
