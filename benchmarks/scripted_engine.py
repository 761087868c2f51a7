"""An engine that costs nothing: the same tokens for every request, as /generate for the proxy and as chat chunks for the
null proxy, one token a chunk (SGLang's `--incremental-streaming-output`).

`python -m benchmarks.scripted_engine --ids 1,2,3 --port-file F`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.null_proxy import serve


def app(ids: list[int]) -> web.Application:
    application = web.Application(client_max_size=64 << 20)
    native = [_native(ids, n) for n in range(1, len(ids) + 1)]
    chat = [b'data: {"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'] * len(ids)

    def stream(chunks: list[bytes]):
        async def handler(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for chunk in chunks:
                await response.write(chunk)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response

        return handler

    application.router.add_post("/generate", stream(native))
    application.router.add_post("/v1/chat/completions", stream(chat))
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


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--ids", required=True)
    cli.add_argument("--port-file", type=Path, required=True)
    options = cli.parse_args()
    serve(app([int(t) for t in options.ids.split(",")]), options.port_file)
