"""What every handler shares: settings, stores, and the threads that talk to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from polar.config import Settings
from polar.objects import open_objects
from polar.store.capture import CaptureStore
from polar.store.connection import connect, connect_async
from polar.store.keys import Keys
from polar.store.sessions import SessionStore

T = TypeVar("T")

THREADS = 32


class Control:
    """The blocking stores of this process, for use in `call`, and an asyncio client for what waits on streams."""

    def __init__(self, settings: Settings, *, upload_limit: int = 1 << 30):
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self.store = SessionStore(connect(settings.store_url), self.keys)
        self.capture = CaptureStore(self.store.redis, self.keys)
        self.objects = open_objects(settings.objects_url)
        self.redis: Any = connect_async(settings.store_url)
        self.upload_limit = upload_limit
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="api")

    async def call(self, function: Callable[..., T], *args: Any, **kw: Any) -> T:
        """Run a blocking function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kw))

    async def close(self) -> None:
        await self.redis.aclose()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.store.redis.close()


CONTROL = web.AppKey("control", Control)


def control(request: web.Request) -> Control:
    return request.app[CONTROL]
