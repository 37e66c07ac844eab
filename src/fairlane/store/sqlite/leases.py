"""Leases by the machine's monotonic clock, for sessions and terms alike."""

from __future__ import annotations

SLACK = 1.0


def lease_left(expires: float, granted_in: str, lease: float, mono: float, boot: str) -> float:
    """Seconds until a lease ends, 0 or less once it has.

    Readings of two boots cannot be compared, and where boots have no names a lease that has more left than it ever had
    betrays another one. The slack allows for rounding.
    """
    left = expires - mono
    return left if granted_in == boot and left <= lease + SLACK else min(left, 0.0)
