"""Eight requests at once: the policy guesses a number in parallel, and each guess is rewarded by its id."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from openai import AsyncOpenAI

SEED = int(os.environ["RAGEN_SEED"])
GUESSES = 8


async def guess(client: AsyncOpenAI, number: int) -> tuple[str, bool]:
    """Return the id of a response and whether it is right."""
    words = f"Guess {number}: is {SEED} even or odd?"
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": words}]
    )
    right = ("even", "odd")[SEED % 2]
    return completion.id, right in (completion.choices[0].message.content or "")


async def main() -> None:
    """Write the result: a reward for each response."""
    async with AsyncOpenAI() as client:
        guesses = await asyncio.gather(*(guess(client, number) for number in range(GUESSES)))
    result = {
        "reward": 0.0,
        "rewards": {response: right / GUESSES for response, right in guesses},
        "success": all(right for _, right in guesses),
    }
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
