"""Servers that answer with given bytes, and the shapes of vLLM's and OpenAI's streams as their servers write them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.fake_engine import logprob


@dataclass
class Asked:
    path: str
    body: dict[str, Any]


@dataclass
class Raw:
    """What to send: a status, the body's bytes in pieces, and how it ends (`close` without a word, `reset`, `clean`)."""

    body: bytes = b""
    status: int = 200
    ending: str = "clean"
    chunked: bool = True
    hold: asyncio.Event | None = None  # before the end


@dataclass
class RawServer:
    answer: Callable[[Asked], Raw]
    asked: list[Asked] = field(default_factory=list)
    gone: int = 0  # clients that closed while held
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        size = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length")), 0)
        text = await reader.readexactly(size)
        asked = Asked(path, json.loads(text or b"{}"))
        self.asked.append(asked)
        raw = self.answer(asked)
        kind = "text/event-stream" if raw.status == 200 else "application/json"
        ending = "Transfer-Encoding: chunked" if raw.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 {raw.status} X\r\nContent-Type: {kind}\r\n{ending}\r\n\r\n".encode())
        if raw.body:
            writer.write(b"%x\r\n%s\r\n" % (len(raw.body), raw.body) if raw.chunked else raw.body)
        await writer.drain()
        if raw.hold is not None:
            release, left = asyncio.ensure_future(raw.hold.wait()), asyncio.ensure_future(reader.read(1))
            await asyncio.wait({release, left}, return_when=asyncio.FIRST_COMPLETED)
            self.gone += left.done()
            for waiting in (release, left):
                waiting.cancel()
        if raw.ending == "reset":
            writer.transport.abort()
        elif raw.ending == "clean" and raw.chunked:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        return False


@contextlib.asynccontextmanager
async def serving(answer: Callable[[Asked], Raw]) -> AsyncIterator[RawServer]:
    server = RawServer(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def sse(*chunks: Any, done: bool = True) -> bytes:
    out = b"".join(b"data: " + (c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n\n" for c in chunks)
    return out + b"data: [DONE]\n\n" if done else out


def sglang_chunks(ids: list[int], *, incremental: bool = False, end: str | None = "stop", step: int = 2) -> list[dict]:
    out = []
    for at in range(0, len(ids), step):
        new = min(at + step, len(ids))
        first = at if incremental else 0
        meta: dict[str, Any] = {
            "completion_tokens": new,
            "weight_version": "v1",
            "output_token_logprobs": [[logprob(i, t), t, None] for i, t in enumerate(ids)][first:new],
            "finish_reason": None,
        }
        if new == len(ids) and end:
            meta["finish_reason"] = {"type": end} | ({"matched": ids[-1]} if end == "stop" else {})
        out.append({"output_ids": ids[first:new], "meta_info": meta})
    return out


def vllm_chunks(ids: list[int], *, end: str | None = "stop", step: int = 2, matched: Any = None) -> list[dict]:
    """As version 0.32 streams them, the token counts in a chunk of their own."""
    out = []
    for at in range(0, max(len(ids), 1), step):
        new = ids[at : at + step]
        last = at + step >= len(ids)
        content = [
            {"token_id": t, "logprob": logprob(at + i, t), "rank": 1, "top_logprobs": []} for i, t in enumerate(new)
        ]
        choice = {
            "index": 0,
            "finish_reason": end if last else None,
            "stop_reason": matched if last else None,
            "token_ids": new,
            "routed_experts": None,
            "weight_versions": [{"version": "v1", "start": 0, "end": len(ids)}] if last and end else None,
            "logprobs": {"content": content},
        }
        out.append({"request_id": "generate-tokens-c", "usage": None, "output_mode": "tokens", "choices": [choice]})
    usage = {"prompt_tokens": 3, "total_tokens": 3 + len(ids), "completion_tokens": len(ids)}
    return [*out, {"usage": usage, "output_mode": "tokens", "choices": []}] if end else out


def chat_chunks(deltas: list[dict], *, end: str | None = "stop", ids: list[list[int]] | None = None) -> list[dict]:
    """`ids`: per delta, as a vLLM that was asked for them adds them."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    out: list[dict] = [{**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    if ids is not None:
        out[0]["prompt_token_ids"] = [1, 2, 3]
    at = 0
    for n, delta in enumerate(deltas):
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        if ids is not None:
            content = [{"token": f"token_id:{t}", "logprob": logprob(at + i, t)} for i, t in enumerate(ids[n])]
            choice |= {"token_ids": ids[n], "logprobs": {"content": content}}
            at += len(ids[n])
        if n == len(deltas) - 1 and end:
            choice["finish_reason"] = end
        out.append({**head, "choices": [choice]})
    if end:
        out.append({**head, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": at or 7}})
    return out
