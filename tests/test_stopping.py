"""An event loop that is told to stop does so, whatever its tasks await."""

from __future__ import annotations

import asyncio
import time

import asynccoll as ac
from patience import patient


def test_a_stream_of_calls_that_are_over_at_once_does_not_keep_asyncio_running() -> None:
    """Nothing else was ready when ``main`` had ended, so each await was served without the loop."""
    streaming: list[asyncio.Task[None]] = []

    async def stream(begun: asyncio.Event) -> None:
        deadline = time.monotonic() + patient(20)
        for number in range(10**9):
            await ac.all_reduce(1.0)
            if number == 20:
                begun.set()
            assert time.monotonic() < deadline, "it was not cancelled"

    async def main() -> None:
        begun = asyncio.Event()
        streaming.append(asyncio.create_task(stream(begun)))
        await begun.wait()

    asyncio.run(main())
    assert streaming[0].cancelled()
