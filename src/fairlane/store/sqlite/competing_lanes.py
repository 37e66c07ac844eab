"""The other lanes of a queue, counted for an estimate: the cost has a bound that neither the backlog nor the number of
lanes moves."""

from __future__ import annotations

from ..positions import MANY_LANES, MOST_LANES, LineFigures, counted
from .job_record import Entry
from .reading import View


def line(view: View, e: Entry, own: int) -> LineFigures | None:
    """The lanes that share a domain with a waiting job which has `own` jobs of its lane and class before it."""
    row = view.one("domain_get", e.inbox, e.class_, e.queue)
    if row is None:
        return None
    domain, clock = row
    _, finish, head_tag, _ = view.one("flow_get", domain, e.flow_key) or (None, 0, None, None)
    [active] = view.one("flows_active", e.inbox, e.class_, e.queue, MANY_LANES)
    [limited] = (0,) if e.inbox else view.one("lanes_limited", e.queue, MANY_LANES)
    most = counted(own, active, limited)
    blocked = []
    if limited:
        blocked = view.all(
            "competing_lanes_blocked", domain, e.queue, e.flow_key, most, e.class_, MOST_LANES, MANY_LANES
        )
    return LineFigures(
        clock=clock,
        finish=finish,
        tag=head_tag,
        active=active,
        limited=limited,
        counted=most,
        ready=view.all("competing_lanes_ready", domain, e.queue, e.flow_key, most, MOST_LANES),
        blocked=blocked,
    )
