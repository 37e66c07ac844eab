"""The examples of the HTTP service, run as their first lines say."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from fairlane import new_id
from fairlane.http.transport import parse_events

from .fleet import ROOT, Process
from .instances import Site, started
from .world import Stage, World

PAGE = ROOT / "examples" / "image_bot" / "page.html"


def example(world: World, name: str, web: str, **env: str) -> Process:
    """Start an example under uvicorn."""
    place = f"examples/{name}"
    return world.fleet.program("uvicorn", web, "--app-dir", place, "--port", "0", name=name, env=env)


async def test_the_service_with_three_slots(stage: Stage) -> None:
    async with stage.world() as world:
        [site] = await started(world, example(world, "http_service", "service:web"))
        [session] = [s for s in await world.client.sessions() if s.pid == site.process.pid and s.slots is not None]
        assert session.slots is not None
        assert (session.slots.total, session.slots.reserved.high) == (3, 1)
        body = {"task": "service.work", "kwargs": {"seconds": 0.2}, "options": {"priority": "high"}}
        headers = {"Idempotency-Key": "order-17"}
        sent = [await site.http.post("/api/v1/jobs", json=body, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in sent] == [202, 202]
        first, second = (answer.json() for answer in sent)
        assert (first["id"], first["created"], second["created"]) == (second["id"], True, False)
        assert sent[0].headers["location"] == f"/api/v1/jobs/{first['id']}"
        answer = await site.http.get(f"/api/v1/jobs/{first['id']}/result?wait=20")
        assert answer.json()["result"] == "done after 0.2 s"
        assert (await site.status(first["id"]))["status"] == "completed"
        old = await site.submit("high")
        assert (await site.status(old))["status"] in ("queued", "processing")
        assert (await site.http.get("/readyz")).status_code == 200
        await site.close()


async def test_people_see_their_place_change(stage: Stage) -> None:
    async with stage.world() as world:
        [site] = await started(world, example(world, "image_bot", "bot:web", PAINT_SECONDS="0.5"))
        page = (await site.http.get("/")).text
        assert page == PAGE.read_text()
        assert len(page.splitlines()) <= 60
        sent = {model: [await ask(site, model, f"cat {n}") for n in range(3)] for model in ("flux", "sdxl")}
        seen = await asyncio.gather(*(screen(site, id) for ids in sent.values() for id in ids))
        for number, events in enumerate(seen):
            # The page listens to exactly these.
            assert {kind for kind, _ in events} <= set(re.findall(r'"(state|position|progress)"', page))
            places = [job["position"]["place"] for _, job in events if job["position"]]
            assert places == sorted(places, reverse=True)
            if number % 3 == 2:
                assert places[-1] == 1, "its place did not change while it waited"
            last = events[-1][1]
            assert last["final"]
            assert last["result"].startswith("/pictures/")
        refused = await site.http.post("/api/v1/jobs", json={"task": "paint", "args": ["dalle", "a cat"]})
        assert refused.status_code == 422
        assert "lane" in refused.json()["field"]
        failed = await screen(site, await ask(site, "flux", " "))
        assert failed[-1][1]["error"].strip().endswith("ValueError: the prompt is empty")
        await site.close()


async def ask(site: Site, model: str, prompt: str) -> str:
    """What the page sends."""
    body = {"task": "paint", "kwargs": {"model": model, "prompt": prompt}}
    answer = await site.http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": new_id()})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def screen(site: Site, id: str) -> list[tuple[str, dict[str, Any]]]:
    """What the page gets by its EventSource, until the end."""
    async with site.http.stream("GET", f"/api/v1/jobs/{id}/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        return [(e.event, msgspec.json.decode(e.data)) async for e in parse_events(answer.aiter_lines())]
