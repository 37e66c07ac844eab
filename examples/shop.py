"""A small shop: pictures for customers, mail, and one model that answers one question at a time.

fairlane worker -A examples/shop.py
fairlane enqueue -A examples/shop.py render ann "a cat" --wait
"""

import asyncio

from fairlane import Fairlane, current_job

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
app.queue("images").lane("user:*", max_pending=1_000)
app.queue("models").lane("*", limit=1)


@app.task(queue="images", lane="user:{user}", retries=3, timeout=120)
async def render(user: str, prompt: str) -> str:
    """Draw a picture. Each user has a lane, so no user waits behind the hundred pictures of another."""
    for step in range(1, 5):
        await asyncio.sleep(0.25)
        current_job().progress({"step": step, "of": 4})
    return f"{user}/{prompt.replace(' ', '-')}.png"


@app.task(queue="models", lane="{model}")
async def answer(model: str, question: str) -> str:
    """Ask a model. Its lane has a limit of one: jobs run in order of arrival, and each has a place in line."""
    await asyncio.sleep(0.5)
    return f"{model} has thought about {question!r}"


@app.task(queue="mail", priority="low")
def send_mail(to: str, subject: str) -> None:
    """Send a mail. A plain function runs in a thread."""
    print(f"to {to}: {subject}")


async def main() -> None:
    """Send one job and wait for it, while a worker runs elsewhere."""
    async with app:
        job = await render.enqueue("ann", "a cat")
        async for update in job.watch():
            print(update.state, update.position, update.progress)
        print(await job.result())


if __name__ == "__main__":
    asyncio.run(main())
