"""How long a job waits before it is retried, after an error and after a crash.

Pure: the random number in [0, 1) (`draw`) comes from the caller. The policy is stored with the job, so a manager
without the user's code can apply it.
"""

from __future__ import annotations

import msgspec

from .names import check_count, check_factor, check_seconds


class Backoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exponential back-off with full jitter.

    The delay is drawn between 0 and ``base * factor ** (attempt - 1)``, which never exceeds `most`.
    `jitter=False` always waits the upper bound; `factor=1` keeps the bound the same for every attempt.
    """

    base: float = 1.0
    factor: float = 2.0
    most: float = 300.0
    jitter: bool = True

    def __post_init__(self) -> None:
        check_seconds("backoff.base", self.base)
        check_factor("backoff.factor", self.factor)
        check_seconds("backoff.most", self.most)

    def delay(self, attempt: int, draw: float) -> float:
        """Seconds to wait after the `attempt`-th charged run (1 at first)."""
        check_count("attempt", attempt, least=1)
        try:
            whole = min(self.most, self.base * self.factor ** (attempt - 1))
        except OverflowError:
            # The power exceeds the range of floats, so the product exceeds the cap, unless the base is 0.
            whole = self.most if self.base else 0.0
        return whole * draw if self.jitter else whole

    def after_crash(self, attempt: int, crashes: int, draw: float) -> float:
        """Seconds to wait after a crash: the first is retried at once, later ones back off."""
        return 0.0 if crashes <= 1 else self.delay(attempt, draw)


DEFAULT_BACKOFF = Backoff()


def counted(attempt: int, retries: int) -> str:
    """A run and the budget in text, such as "2 of 4". Celery may retry a task beyond it, and then only "5"."""
    return f"{attempt} of {retries + 1}" if attempt <= retries + 1 else str(attempt)


def may_retry(attempt: int, retries: int) -> bool:
    """Whether a job that was charged `attempt` runs may run again: the budget is ``retries + 1`` runs."""
    return attempt <= retries
