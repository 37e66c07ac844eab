"""Exactly once: a job writes to the database of its store in the transaction that also stores its result.

python examples/exactly_once.py

    1 word
    2 words
"""

import asyncio
import sqlite3

from fairlane import Fairlane, current_job

app = Fairlane("sqlite:///exactly_once.db")  # this example is for SQLite; PostgreSQL works the same


@app.task
async def count(word: str) -> int:
    """Write to a table of your own. If the worker dies, the write is rolled back before the job runs again."""
    connection: sqlite3.Connection = await current_job().transaction()
    connection.execute("CREATE TABLE IF NOT EXISTS words (word TEXT)")
    connection.execute("INSERT INTO words VALUES (?)", (word,))
    [[words]] = connection.execute("SELECT count(*) FROM words").fetchall()
    return int(words)


async def main() -> None:
    """Run two jobs one after the other."""
    async with app:
        for word in ("tea", "salt"):
            job = await count.enqueue(word)
            await app.worker(burst=True).run()
            words = await job.result()
            print(words, "word" if words == 1 else "words")


if __name__ == "__main__":
    asyncio.run(main())
