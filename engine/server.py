"""The HTTP application: /generate, status, metrics. Control routes are in engine.control."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version

import msgspec
from aiohttp import web

from engine import control
from engine.core import Engine
from engine.errors import ApiError, error_body
from engine.intake import build_requests, health_request
from engine.protocol import DetokenizeBody, GenerateBody, TokenizeBody, decode
from engine.request import Request, View
from engine.responses import Renderer

log = logging.getLogger(__name__)

ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)
_BODY_LIMIT = 64 << 20
_OPEN = {"/health", "/health_generate", "/ready", "/metrics"}  # these tell nothing secret and need no key
_HEALTH_TIMEOUT = 20.0


def create_app(engine: Engine, api_key: str | None = None) -> web.Application:
    """The application of an engine; it starts and stops the engine with itself.

    Run it with `handler_cancellation=True`: that is how a client that goes away aborts its generation.
    """
    app = web.Application(client_max_size=_BODY_LIMIT, middlewares=[_errors, _auth(api_key)])
    app[ENGINE] = engine
    app.add_routes(
        [
            web.post("/generate", generate),
            web.put("/generate", generate),
            web.get("/health", health),
            web.get("/health_generate", health_generate),
            web.get("/ready", health),
            web.get("/model_info", model_info),
            web.get("/get_model_info", model_info),
            web.get("/v1/models", models),
            web.get("/server_info", server_info),
            web.get("/get_server_info", server_info),
            web.get("/metrics", metrics),
            *(web.post(path, tokenize) for path in ("/tokenize", "/v1/tokenize")),
            *(web.post(path, detokenize) for path in ("/detokenize", "/v1/detokenize")),
            *control.routes(ENGINE),
        ]
    )

    async def life(app: web.Application) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app.cleanup_ctx.append(life)
    return app


def answer(value: object, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _auth(api_key: str | None):
    @web.middleware
    async def middleware(request: web.Request, handler):
        if api_key is not None and request.path not in _OPEN:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), api_key.encode()):
                return answer(error_body("Unauthorized: send the API key as a bearer token.", 401), 401)
        return await handler(request)

    return middleware


@web.middleware
async def _errors(request: web.Request, handler):
    try:
        return await handler(request)
    except ApiError as error:
        return answer(error.body(), error.status)
    except web.HTTPException as error:
        return answer(error_body(f"{error.reason}: {request.method} {request.path}", error.status), error.status)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return answer(error_body("Internal server error; see the server's log.", 500), 500)


async def generate(request: web.Request) -> web.StreamResponse:
    """POST or PUT /generate."""
    engine = request.app[ENGINE]
    body = decode(await request.read(), GenerateBody)
    requests, many = build_requests(body, engine)
    engine.submit(requests)
    try:
        if body.stream:
            return await _stream(request, engine, body, requests, many)
        async for _ in _progress(requests):
            pass
        for item in requests:
            if item.view.failed:
                raise ApiError((item.view.finish or {}).get("message", ""), item.view.failed)
        results = [_renderer(item, engine, body, False).render(item.view, engine.version) for item in requests]
        return answer(results if many else results[0])
    finally:
        engine.release(requests)


async def _stream(http: web.Request, engine: Engine, body: GenerateBody, requests: list[Request], many: bool):
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(http)
    renderers = [_renderer(item, engine, body, engine.options.incremental_stream) for item in requests]
    try:
        async for index, view in _progress(requests):
            chunk = renderers[index].render(view, engine.version)
            if many:
                chunk["index"] = index
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionError:
        log.info("the client of %s went away", requests[0].rid)
    return response


def _renderer(item: Request, engine: Engine, body: GenerateBody, incremental: bool) -> Renderer:
    return Renderer(
        item,
        engine.tokenizer,
        texts=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
        incremental=incremental,
    )


async def _progress(requests: list[Request]) -> AsyncIterator[tuple[int, View]]:
    """Yield (index, view) for what is new, until all are finished. A slow reader sees fewer, larger steps."""
    changed = asyncio.Event()
    for item in requests:
        item.changed = changed
    seen: list[View | None] = [None] * len(requests)
    left = set(range(len(requests)))
    while left:
        for index in sorted(left):
            view = requests[index].view
            if view.finish is not None:
                left.discard(index)
            if view is not seen[index] and (view.tokens or view.finish is not None):
                seen[index] = view
                yield index, view
        if left:
            await changed.wait()
            changed.clear()


async def health(request: web.Request) -> web.Response:
    """GET /health and /ready: 200 while the model thread runs."""
    return web.Response(status=200 if request.app[ENGINE].alive else 503)


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: 200 if a token can be generated within 20 s (no metric counts it), or generation
    is paused.
    """
    engine = request.app[ENGINE]
    if engine.paused:
        return await health(request)
    probe = health_request(engine)
    engine.submit([probe], bounded=False)
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT):
            async for _ in _progress([probe]):
                pass
    except TimeoutError:
        return web.Response(status=503)
    finally:
        engine.release([probe])
    return web.Response(status=503 if probe.view.failed else 200)


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info."""
    engine = request.app[ENGINE]
    return answer(
        {
            "model_path": str(engine.model_path),
            "served_model_name": engine.options.served_name,
            "tokenizer_path": str(engine.folder),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.version,
            "load_format": "safetensors",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": engine.model.config.model_type,
            "architectures": engine.model.config.architectures,
        }
    )


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    engine = request.app[ENGINE]
    name = engine.options.served_name
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "polar",
        "root": name,
        "parent": None,
    }
    return answer({"object": "list", "data": [{**card, "max_model_len": engine.model.context}]})


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info."""
    engine = request.app[ENGINE]
    scheduler = engine.scheduler
    try:
        own = version("polar-rollout")
    except PackageNotFoundError:
        own = "unknown"
    state = {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "paused": engine.paused,
        "kv_tokens_used": scheduler.pool.used,
        "kv_tokens_total": scheduler.pool.budget,
    }
    return answer(
        {
            **msgspec.to_builtins(engine.options),
            "engine": "polar",
            "version": own,
            "model_path": str(engine.model_path),
            "weight_version": engine.version,
            "max_model_len": engine.model.context,
            "internal_states": [state],
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    engine = request.app[ENGINE]
    engine.scheduler.gauges()
    text = engine.metrics.render()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: {"tokens", "count", "max_model_len"}."""
    engine = request.app[ENGINE]
    body = decode(await request.read(), TokenizeBody)
    given = body.prompt if body.prompt is not None else body.text
    if (given is None) == (body.messages is None):
        raise ApiError("Give either prompt (or text) or messages.")
    if body.messages is not None:
        generation = body.add_generation_prompt is not False
        given = engine.tokenizer.render(body.messages, body.tools, generation, body.chat_template_kwargs)
    context = engine.model.context
    if isinstance(given, list):
        tokens = [engine.tokenizer.encode(text) for text in given]
        return answer({"tokens": tokens, "count": [len(ids) for ids in tokens], "max_model_len": context})
    ids = engine.tokenizer.encode(given or "")
    return answer({"tokens": ids, "count": len(ids), "max_model_len": context})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: {"text"}."""
    engine = request.app[ENGINE]
    body = decode(await request.read(), DetokenizeBody)
    nested = bool(body.tokens) and isinstance(body.tokens[0], list)
    texts = []
    for ids in body.tokens if nested else [body.tokens]:
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < engine.model.vocab for token in ids
        ):
            raise ApiError(f"tokens must be token ids in [0, {engine.model.vocab - 1}].")
        texts.append(engine.tokenizer.decode(ids, body.skip_special_tokens))
    return answer({"text": texts if nested else texts[0]})
