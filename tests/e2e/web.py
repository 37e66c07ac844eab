"""The application under test as one complete instance: uvicorn tests.e2e.web:web."""

from __future__ import annotations

import asyncio
import os

from fairlane.http import serve_app

from .tasks import app, noted


@app.task
async def work() -> str:
    """What the old API runs."""
    with noted():
        await asyncio.sleep(float(os.environ.get("E2E_WORK_SECONDS", "0.3")))
    return "done"


web = serve_app(app, legacy_task=work)
