"""The control plane in this process, on the suite's Redis and a folder of objects."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from api.app import make_app
from api.control import Control
from polar.config import Settings
from polar.objects import open_objects

TOKEN = "test-token"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def settings(redis_url, store, tmp_path) -> Settings:
    return Settings(
        broker=redis_url,
        namespace="t",
        data_dir=str(tmp_path),
        proxy_url="http://127.0.0.1:9/",
        default_runtime="local",
    )


@pytest.fixture
def objects(settings):
    return open_objects(settings.objects_url)


@pytest.fixture
def make_api(aiohttp_client, settings):
    """Makes clients of control planes; each is stopped at the end."""

    async def make(token: str = "", **kw):
        control = Control(settings, upload_limit=kw.pop("upload_limit", 1 << 20))
        return await aiohttp_client(make_app(control, token, **kw), headers=AUTH if token else {})

    return make


@pytest.fixture
async def api(make_api):
    return await make_api()


class Receiver:
    """A trainer's callback listener; `answers` are the statuses of the next requests, then 200."""

    def __init__(self):
        self.bodies: list[dict] = []
        self.answers: list[int] = []
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/done", self._take)
        self.server = TestServer(app)

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.json()
        status = self.answers.pop(0) if self.answers else 200
        if status == 200:
            self.bodies.append(body)
        headers = {"Location": "https://example.invalid/"} if 300 <= status < 400 else {}
        return web.Response(status=status, headers=headers)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/done"))


@pytest.fixture
async def receiver():
    r = Receiver()
    await r.server.start_server()
    yield r
    await r.server.close()
