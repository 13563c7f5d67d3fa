"""Several streams of outputs as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from vllm.outputs import RequestOutput

_Item = tuple[int, RequestOutput | Exception | None]


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Items of all streams in order of arrival; the first error ends and closes them all."""
    # Bounded: while nobody takes items, the streams stand still too.
    queue: asyncio.Queue[_Item] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            index, item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[RequestOutput, None], queue: "asyncio.Queue[_Item]"
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
