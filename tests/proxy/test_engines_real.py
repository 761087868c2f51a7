"""Weights changed in the middle of a generation, on real engines: one completion, two versions, exact log-probabilities."""

from __future__ import annotations

import json

import aiohttp
import numpy as np
import pytest

from polar.completion import Completion, resolve_prompts
from polar.config import Model, Settings
from polar.store.capture import CaptureStore, Grant
from polar.store.connection import connect
from polar.store.keys import Keys
from proxy.server import Server
from tests.proxy.test_real_engines import ENGINES, model_folder  # noqa: F401

NAMESPACE = "update"


async def post(url: str, body: dict | None = None) -> dict:
    async with aiohttp.ClientSession() as http, http.post(url, json=body or {}) as response:
        text = await response.text()
        assert response.status == 200, text
        return json.loads(text) if text.startswith("{") else {}


async def update(server: Server, engine: str, announced: bool) -> None:
    """What a trainer does; one that doesn't tell the proxy is served as well."""
    if announced:
        state = await post(f"{server.admin_url}/pause", {"mode": "hold"})
        assert state["models"]["policy"]["in_flight"] == 1
    await post(f"{engine}/pause_generation", {"mode": "abort"})
    await post(f"{engine}/update_weight_version", {"new_version": "v2", "abort_all_requests": False})
    await post(f"{engine}/continue_generation")
    if announced:
        await post(f"{server.admin_url}/resume")


async def scored(engine: str, prompt: np.ndarray, c: Completion) -> np.ndarray:
    """The engine's own log-probabilities of the sampled ids, computed in one go."""
    ids = [*prompt.tolist(), *c.sampled_ids.tolist()]
    params = {"max_new_tokens": 0, "temperature": 1.0}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    answer = await post(f"{engine}/generate", body)
    return np.array([e[0] for e in answer["meta_info"]["input_token_logprobs"][len(prompt) :]])


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
async def test_an_update_in_the_middle(engine, announced, model_folder, tmp_path, redis_url):  # noqa: F811
    async with engine(model_folder, tmp_path) as url:
        row = Model(engine=url, tokenizer=str(model_folder), context_length=2048, max_new_tokens=600)
        settings = Settings(store=redis_url, namespace=NAMESPACE, models={"policy": row})
        client = connect(redis_url)
        store = CaptureStore(client, Keys(NAMESPACE))
        grant = Grant(session_id="u.s0", attempt=1, task_id="u", model="policy")
        capability = store.mint(grant)
        server = Server(settings, heartbeat=0.5, admin_port=0)
        await server.start()
        try:
            body = {"messages": [{"role": "user", "content": "Say something long."}], "stream": True}
            target = f"{server.url}/s/{capability}/v1/chat/completions"
            async with aiohttp.ClientSession() as http, http.post(target, json=body) as response:
                got = b""
                while got.count(b'"content"') < 6:
                    got += await response.content.readany()
                await update(server, url, announced)
                got += await response.read()
            assert got.endswith(b"data: [DONE]\n\n")
            (c,) = store.read(grant.attempt_id)
            prompt = resolve_prompts([c])[c.completion_id]
            exact = await scored(url, prompt, c)
        finally:
            await server.stop()
            client.delete(*client.keys(f"*{NAMESPACE}*"))
            client.close()
    assert not c.untrainable and c.finish_reason in ("stop", "length")
    first, second = c.versions
    assert first.start == 0 < first.end == second.start < second.end == len(c.sampled_ids) == len(c.logprobs)
    assert second.version == "v2" != first.version
    assert np.abs(exact - c.logprobs).max() < 1e-3
    text = "".join(
        json.loads(e[6:])["choices"][0]["delta"].get("content") or ""
        for e in got.decode().split("\n\n")
        if e.startswith("data: {")
    )
    assert text == c.response["content"], "the client saw one answer"
