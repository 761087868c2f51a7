"""Who may call: the capability in the path or as the key, and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
CHAT = "/v1/chat/completions"


async def call(world, path: str, headers: dict | None = None, body=BODY, method: str = "POST"):
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, world.server.url + path, json=body, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize(
    "headers",
    [
        lambda c: {"Authorization": f"Bearer {c}"},
        lambda c: {"authorization": f"bearer {c}"},
        lambda c: {"x-api-key": c},
        lambda c: {"x-goog-api-key": c},
    ],
)
async def test_the_key_names_the_session(world, headers):
    capability, grant = world.mint()
    world.says("hi")
    status, _ = await call(world, CHAT, headers(capability))
    assert status == 200 and len(world.stored(grant)) == 1


async def test_the_path_wins_over_every_header(world):
    mine, my_grant = world.mint("t.s0")
    other, other_grant = world.mint("t.s1")
    world.says("hi")
    headers = {
        "Authorization": f"Bearer {other}",
        "x-api-key": other,
        "x-session-id": other_grant.session_id,
        "X-Claude-Code-Session-Id": other_grant.session_id,
    }
    status, _ = await call(world, f"/s/{mine}{CHAT}", headers)
    assert status == 200
    assert len(world.stored(my_grant)) == 1 and world.stored(other_grant) == []
    status, _ = await call(world, f"/s/wrong{CHAT}", headers)
    assert status == 401


@pytest.mark.parametrize("path", [CHAT, f"/s/{CHAT}", f"/s/sk-polar-unknown{CHAT}", "/s/%2e%2e" + CHAT])
async def test_unknown_capabilities_get_nothing(world, path):
    status, answer = await call(world, path)
    assert status == 401 and set(answer["error"]) == {"message", "type", "code", "param"}
    assert world.engine.served == []


async def test_revoked_and_expired_are_gone(world):
    revoked, grant = world.mint("t.s0")
    world.says("hi")
    assert (await call(world, f"/s/{revoked}{CHAT}"))[0] == 200
    world.store.revoke(grant.attempt_id)
    status, answer = await call(world, f"/s/{revoked}{CHAT}", body=BODY | {"messages": BODY["messages"] * 2})
    assert status == 410 and answer["error"]["code"] == "session_ended"
    assert (await call(world, f"/s/{revoked}{CHAT}"))[0] == 410  # the same body neither replays nor joins
    assert (await call(world, f"/s/{revoked}/v1/models", method="GET", body=None))[0] == 410
    late, late_grant = world.mint("t.s1", expires_at=time.time() - 1)
    assert (await call(world, f"/s/{late}{CHAT}"))[0] == 410
    assert len(world.engine.served) == 1 and world.stored(late_grant) == []


async def test_unknown_paths_and_methods(world):
    capability, _ = world.mint()
    for path in (f"/s/{capability}/v1/embeddings", f"/s/{capability}", "/", f"/s/{capability}/v1/chat/completions/x"):
        status, answer = await call(world, path)
        assert status == 404 and answer["error"]["code"] == "unknown_path"
    status, answer = await call(world, f"/s/{capability}{CHAT}", method="GET", body=None)
    assert status == 405
    assert (await call(world, f"/s/{capability}/health", method="GET", body=None))[0] == 404
    assert (await call(world, f"/s/{capability}/metrics", method="GET", body=None))[0] == 404
    assert world.engine.served == []


async def raw(world, capability: str, data: bytes, headers: dict | None = None):
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.server.url}/s/{capability}{CHAT}", data=data, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"messages":' + b'[{"a":' * 50_000],
    ids=["empty", "list", "cut", "string", "no utf-8", "deep", "deep objects"],
)
async def test_bad_bodies(world, data):
    capability, _ = world.mint()
    status, answer = await raw(world, capability, data)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


async def test_too_large_bodies(world):
    capability, _ = world.mint()
    status, answer = await raw(world, capability, b" " * ((64 << 20) + 1))
    assert status == 413 and answer["error"]["code"] == "request_too_large"


async def test_half_an_emoji_is_not_an_error(world):
    """JavaScript writes a lone surrogate when it cuts text inside an emoji."""
    capability, grant = world.mint()
    world.says("hi")
    status, _ = await raw(world, capability, rb'{"messages":[{"role":"user","content":"cut \ud83d"}]}')
    assert status == 200 and world.stored(grant)[0].messages[0]["content"] == "cut \ufffd"


async def test_turn_and_token_limits(world):
    capability, grant = world.mint(max_turns=2)
    for i in range(2):
        world.says("hi")
        assert (await call(world, f"/s/{capability}{CHAT}", body=turn(i)))[0] == 200
    status, answer = await call(world, f"/s/{capability}{CHAT}", body=turn(9))
    assert status == 403 and answer["error"]["code"] == "turn_limit"
    assert world.store.usage(grant.attempt_id)[1] == "turn_limit"
    capability, grant = world.mint("t.s1", max_total_tokens=10)
    world.says("hi")
    assert (await call(world, f"/s/{capability}{CHAT}", body=turn(0)))[0] == 200
    status, answer = await call(world, f"/s/{capability}{CHAT}", body=turn(1))
    assert status == 403 and answer["error"]["code"] == "token_limit"


async def test_the_turn_limit_holds_under_concurrency(world):
    capability, grant = world.mint(max_turns=3)
    for _ in range(10):
        world.says("hi")
    answers = await asyncio.gather(*(call(world, f"/s/{capability}{CHAT}", body=turn(i)) for i in range(10)))
    assert sorted(status for status, _ in answers) == [200] * 3 + [403] * 7
    assert len(world.engine.served) == len(world.stored(grant)) == 3
    assert sorted(c.index for c in world.stored(grant)) == [0, 1, 2]


def turn(i: int) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": f"go {i}"}]}


async def test_the_admin_plane_is_apart(bare_world):
    server = await bare_world.serve(admin_port=0)
    async with aiohttp.ClientSession() as http:
        async with http.get(server.admin_url + "/health") as response:
            assert response.status == 200 and (await response.json())["store"] is True
        async with http.get(server.admin_url + "/metrics") as response:
            assert "polar_proxy_generations" in await response.text()
        async with http.post(server.admin_url + CHAT, json=BODY) as response:
            assert response.status == 404


async def test_the_unix_socket_serves_the_same(bare_world, tmp_path_factory):
    path = tmp_path_factory.getbasetemp().parent / "p.sock"
    await bare_world.serve(socket=str(path))
    capability, _ = bare_world.mint()
    bare_world.says("hi")
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.post(f"http://polar/s/{capability}{CHAT}", json=BODY) as response,
    ):
        assert response.status == 200


V = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("path", "headers", "keys"),
    [
        ("/v1/messages/batches", {}, {"type", "error", "request_id"}),
        ("/v1/files", V, {"type", "error", "request_id"}),
        ("/v1/models", V, {"type", "error", "request_id"}),  # POST: a wrong method
        ("/v1beta/files", {}, {"code", "message", "status", "details"}),
        ("/v1/files", {"x-goog-api-client": "genai"}, {"code", "message", "status", "details"}),
        ("/v1/files?key=x", {}, {"code", "message", "status", "details"}),
        ("/v1/files", {}, {"message", "type", "code", "param"}),
        ("/v1/responses/a/b/c", {}, {"message", "type", "code", "param"}),
    ],
)
async def test_refusals_of_unknown_paths_are_in_the_callers_envelope(world, path, headers, keys):
    capability, _ = world.mint()
    status, answer = await call(world, f"/s/{capability}{path}", headers)
    assert status == (405 if path == "/v1/models" else 404)
    assert keys in (set(answer), set(answer["error"]))


async def test_what_cannot_fit_is_no_overflow_of_an_ended_session(world):
    """It would be noted as the reason for how the agent ended."""
    capability, grant = world.mint()
    huge = {"messages": [{"role": "user", "content": "x" * 200_000}]}
    many = {"messages": [{"role": "user", "content": ""}] * 5000}
    for sent in (huge, many):
        status, answer = await call(world, f"/s/{capability}{CHAT}", body=sent)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    world.store.revoke(grant.attempt_id)
    for sent in (huge, many):
        assert (await call(world, f"/s/{capability}{CHAT}", body=sent))[0] == 410


async def test_what_cannot_fit_is_not_tokenised_to_be_counted(world, monkeypatch):
    capability, _ = world.mint()

    async def render(*_):
        raise AssertionError("it keeps others waiting")

    monkeypatch.setattr(world.server.service.table.pick("policy", "policy").codec, "render", render)
    huge = {"messages": [{"role": "user", "content": "x" * 200_000}]}
    status, answer = await call(world, f"/s/{capability}/v1/messages/count_tokens", body=huge)
    assert status == 200 and answer["input_tokens"] == 200_000 // 32 > 4096
