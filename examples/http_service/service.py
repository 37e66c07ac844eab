"""An HTTP service with three slots, one of them reserved for high priority: the server, a worker and a manager in one
process. Start as many as you like; they share the jobs of one store.

cd examples/http_service
uvicorn service:web --port 8000

curl 'localhost:8000/task?priority=high'            # submit with the legacy API
curl localhost:8000/task/<id>                       # queued, processing, completed or failed

curl localhost:8000/api/v1/jobs -H 'Content-Type: application/json' -H 'Idempotency-Key: order-17' \
     -d '{"task": "service.work", "kwargs": {"seconds": 2}, "options": {"priority": "high"}}'
"""

import asyncio
import os

from fairlane import Fairlane, current_job
from fairlane.http import serve_app

# Per instance. FAIRLANE_MAX_CONCURRENT_TASKS and FAIRLANE_HIGH_PRIORITY_RESERVED take precedence.
os.environ.setdefault("MAX_CONCURRENT_TASKS", "3")
os.environ.setdefault("HIGH_PRIORITY_RESERVED", "1")

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db


@app.task
async def work(seconds: float = 5.0) -> str:
    """Take a while, and report progress."""
    for tenth in range(10):
        current_job().progress({"percent": 10 * tenth})
        await asyncio.sleep(seconds / 10)
    return f"done after {seconds:g} s"


web = serve_app(app, legacy_task=work)
