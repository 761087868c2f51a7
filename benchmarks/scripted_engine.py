"""An engine that costs nothing: the same tokens for every request, as /generate for the proxy and as chat chunks for the
null proxy and its peers, one token a chunk (SGLang's `--incremental-streaming-output`). Under /paced the tokens come one
by one in `--pace` seconds each, else all at once.

`python -m benchmarks.scripted_engine --ids 1,2,3 --port-file F`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.null_proxy import serve


def app(ids: list[int], pace: float) -> web.Application:
    application = web.Application(client_max_size=256 << 20)
    native = [_native(ids, n) for n in range(1, len(ids) + 1)]
    chat = [_chat({"role": "assistant", "content": "word "})] * len(ids) + [_chat({}, "stop")]

    def stream(chunks: list[bytes], pace: float):
        async def handler(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for chunk in chunks:
                if pace:
                    await asyncio.sleep(pace * random.uniform(0.5, 1.5))
                await response.write(chunk)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response

        return handler

    for prefix, seconds in (("", 0.0), ("/paced", pace)):
        application.router.add_post(f"{prefix}/generate", stream(native, seconds))
        application.router.add_post(f"{prefix}/v1/chat/completions", stream(chat, seconds))
    return application


def _native(ids: list[int], n: int) -> bytes:
    last = n == len(ids)
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": ids[-1]} if last else None,
        "completion_tokens": n,
        "weight_version": "v1",
        "output_token_logprobs": [[-0.5, ids[n - 1], None]],
    }
    if last:
        meta["weight_versions"] = [{"version": "v1", "start": 0, "end": n}]
    return b"data: " + json.dumps({"output_ids": ids[n - 1 : n], "meta_info": meta}).encode() + b"\n\n"


def _chat(delta: dict[str, Any], reason: str | None = None) -> bytes:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--ids", required=True)
    cli.add_argument("--pace", type=float, default=0.5)
    cli.add_argument("--port-file", type=Path, required=True)
    options = cli.parse_args()
    serve(app([int(t) for t in options.ids.split(",")], options.pace), options.port_file)
