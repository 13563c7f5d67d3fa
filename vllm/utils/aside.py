"""Python work of seconds beside an event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

# Of their own: what takes milliseconds must not queue behind them.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="aside")


async def aside(function: Callable[..., Result], *arguments: Any) -> Result:
    """function(*arguments), in one of two threads; the loop goes on."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, partial(function, *arguments))
