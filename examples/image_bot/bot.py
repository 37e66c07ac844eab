"""A bot that paints: two models, one picture at a time each, in strict order. Every user watches their place in line.

cd examples/image_bot
uvicorn bot:web --port 8000        # then open http://localhost:8000 in two windows
"""

import asyncio
import os
from pathlib import Path

from fastapi.responses import HTMLResponse

from fairlane import Fairlane, current_job
from fairlane.http import HttpSettings, serve_app

SECONDS = float(os.environ.get("PAINT_SECONDS", "5"))
PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
app.queue("models", lanes=["flux", "sdxl"]).lane("*", limit=1)  # any other model is rejected


@app.task(name="paint", queue="models", lane="{model}", retries=0)
async def paint(model: str, prompt: str) -> str:
    """Paint a picture and return its path."""
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    for percent in range(0, 100, 20):
        current_job().progress({"percent": percent})
        await asyncio.sleep(SECONDS / 5)
    return f"/pictures/{current_job().id}.png"


web = serve_app(app, slots=2, settings=HttpSettings(dashboard=False))  # the page below is at / instead


@web.get("/", response_class=HTMLResponse)
async def page() -> str:
    """The page that shows the place in line."""
    return PAGE
