"""Control routes: weights, pause, abort, cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from aiohttp import web

from engine.core import Engine
from engine.errors import ModelError
from engine.protocol import AbortBody, ContinueBody, PauseBody, UpdateVersionBody, UpdateWeightsBody, decode


def routes(key: web.AppKey[Engine]) -> list[web.RouteDef]:
    """The routes; `key` is where the application keeps its engine."""

    def answer(value: dict, status: int = 200) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")

    async def update_weights(request: web.Request) -> web.Response:
        """POST /update_weights_from_disk: 400 on failure, with weights and version as they were."""
        engine = request.app[key]
        body = decode(await request.read(), UpdateWeightsBody)
        folder = Path(body.model_path).expanduser()
        work = engine.update_weights(folder, body.weight_version, body.flush_cache, body.abort_all_requests)
        try:
            # A caller that goes away doesn't stop an update half-way.
            held = await asyncio.shield(asyncio.ensure_future(work))
        except ModelError as error:
            return answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        return answer({"success": True, "message": message, "num_paused_requests": held})

    async def update_version(request: web.Request) -> web.Response:
        """POST /update_weight_version."""
        engine = request.app[key]
        body = decode(await request.read(), UpdateVersionBody)
        if body.abort_all_requests:
            engine.abort("", True)
        await engine.set_version(body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return answer({"success": True, "message": message, "new_version": body.new_version})

    async def pause(request: web.Request) -> web.Response:
        """POST /pause_generation."""
        body = decode(await request.read(), PauseBody)
        await request.app[key].pause(body.mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(request: web.Request) -> web.Response:
        """POST /continue_generation."""
        decode(await request.read(), ContinueBody)
        await request.app[key].resume()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(request: web.Request) -> web.Response:
        """POST /abort_request: 200 whether or not anything was running."""
        body = decode(await request.read(), AbortBody)
        request.app[key].abort(body.rid, body.abort_all)
        return web.Response(status=200)

    async def flush(request: web.Request) -> web.Response:
        """GET or POST /flush_cache: 400 while requests run, after waiting for up to `timeout` seconds."""
        engine = request.app[key]
        try:
            deadline = asyncio.get_running_loop().time() + float(request.query.get("timeout", 0))
        except ValueError:
            return web.Response(text="timeout must be a number of seconds\n", status=400)
        while not await engine.flush():
            if asyncio.get_running_loop().time() >= deadline:
                return web.Response(text="Cache not flushed: requests are running or waiting.\n", status=400)
            await asyncio.sleep(0.05)
        return web.Response(text="Cache flushed.\n")

    return [
        web.post("/update_weights_from_disk", update_weights),
        web.post("/update_weight_version", update_version),
        web.post("/pause_generation", pause),
        web.post("/continue_generation", resume),
        web.post("/abort_request", abort),
        web.get("/flush_cache", flush),
        web.post("/flush_cache", flush),
    ]
