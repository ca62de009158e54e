"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

__all__ = ["merged"]

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all sources as they come, each with its source's place.

    Raises what a source raises. When it ends, however it does, all sources are closed.
    """
    if len(sources) == 1:
        try:
            async for item in sources[0]:
                yield 0, item
        finally:
            await sources[0].aclose()
        return
    # one item a source is on its way: a slow reader slows the sources down
    waiting = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[i]))] = i
                yield i, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()
