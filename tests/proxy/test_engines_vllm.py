"""vLLM's token-in contract: against its shapes, and (slow) against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from polar.completion import VersionSpan
from proxy.engines.vllm import VLLM
from proxy.failures import CallError
from tests.proxy.engine_orders import PROMPT, check, place
from tests.proxy.fake_servers import Asked, Raw, serving, sse, vllm_chunks

SCRIPT = [*range(50, 60), 0]
VENV = os.environ.get("POLAR_VLLM_VENV", "")


@contextlib.asynccontextmanager
async def client_of(answer, **options):
    async with serving(answer) as server:
        client = VLLM(server.url, 4096, window=0.3, **options)
        try:
            yield client, server
        finally:
            await client.close()


async def test_what_is_asked_and_what_is_read():
    async with client_of(lambda _: Raw(sse(*vllm_chunks(SCRIPT))), model="policy") as (client, server):
        placed = place(limit=40, sampling={"stop": ["x"], "seed": 3})
        sample = await client.generate(placed.order)
    check(placed, sample, SCRIPT, [])
    assert sample.end == "stop" and sample.stop_matched == 0, "the model's own end token isn't named"
    assert sample.versions == [VersionSpan("v1", 0, len(SCRIPT))]
    (asked,) = server.asked
    assert asked.path == "/inference/v1/generate" and placed.accepted == 1
    params = asked.body.pop("sampling_params")
    assert params == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 40,
        "stop_token_ids": [0],
        "logprobs": 0,
        "skip_special_tokens": False,
        "stop": ["x"],
        "seed": 3,
    }
    assert asked.body == {
        "request_id": "c-1",
        "token_ids": PROMPT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "model": "policy",
    }


async def test_a_stop_string_is_named():
    async with client_of(lambda _: Raw(sse(*vllm_chunks([50, 51], matched="x")))) as (client, _):
        sample = await client.generate(place().order)
    assert (sample.end, sample.stop_matched) == ("stop", "x")


async def test_an_abort_by_name_ends_the_stream_in_order():
    ended = asyncio.Event()
    half = vllm_chunks(SCRIPT[:4], end=None)

    def answer(asked: Asked) -> Raw:
        if asked.path.endswith("abort_requests"):
            ended.set()
            return Raw()
        return Raw(sse(*half, *vllm_chunks([], end="abort")[:1], done=False), hold=ended)

    async with client_of(answer) as (client, server):
        placed = place()
        placed.order.tokens = lambda new: placed.order.cancel.set()
        async with asyncio.timeout(5):
            sample = await client.generate(placed.order)
    assert sample.ids == SCRIPT[:4] and sample.end == "abort"
    assert server.asked[1].path == "/inference/v1/abort_requests"
    assert server.asked[1].body == {"request_ids": ["generate-tokens-c-1"]}


async def test_without_that_route_a_closed_connection_aborts():
    """Servers before it had one."""
    half = vllm_chunks(SCRIPT[:4], end=None)

    def answer(asked: Asked) -> Raw:
        if asked.path.endswith("abort_requests"):
            return Raw(b"{}", status=404)
        return Raw(sse(*half, done=False), hold=asyncio.Event())

    async with client_of(answer) as (client, server):
        placed = place()
        placed.order.tokens = lambda new: placed.order.cancel.set()
        async with asyncio.timeout(5):
            sample = await client.generate(placed.order)
            while not server.gone:
                await asyncio.sleep(0.01)
    assert sample.ids == SCRIPT[:4] and sample.end == "abort" and len(sample.logprobs) == 4


async def test_a_weight_update_in_the_middle():
    """`/pause?mode=abort` ends the stream; the completion goes on with the new weights."""

    def answer(asked: Asked) -> Raw:
        done = asked.body["token_ids"][len(PROMPT) :]
        if done:
            chunks = vllm_chunks(SCRIPT[len(done) :])
            chunks[-2]["choices"][0]["weight_versions"][0]["version"] = "v2"
            return Raw(sse(*chunks))
        chunks = vllm_chunks(SCRIPT[:6], end=None)
        last = vllm_chunks([], end="abort")[0]
        last["choices"][0]["weight_versions"] = [{"version": "v1", "start": 0, "end": 6}]
        return Raw(sse(*chunks, last))

    async with client_of(answer) as (client, _):
        placed = place()
        sample = await client.generate(placed.order)
    check(placed, sample, SCRIPT, [6])
    assert sample.versions == [VersionSpan("v1", 0, 6), VersionSpan("v2", 6, len(SCRIPT))]


@pytest.mark.parametrize(
    "status, code", [(403, "engine_refused"), (404, "engine_refused"), (500, "engine_unavailable")]
)
async def test_refusals(status, code):
    error = json.dumps({"error": {"message": "scale out is off", "code": status}}).encode()
    async with client_of(lambda _: Raw(error, status=status)) as (client, _):
        with pytest.raises(CallError) as e:
            await client.generate(place().order)
    assert e.value.code == code


async def test_refusals_inside_the_stream():
    message = "The decoder prompt (length 4200) is longer than the maximum model length of 4096."
    error = {"error": {"message": message, "type": "BadRequestError", "code": 400}}
    async with client_of(lambda _: Raw(sse(error))) as (client, _):
        with pytest.raises(CallError) as e:
            await client.generate(place().order)
    assert e.value.kind == "context_overflow"


async def test_a_schema():
    async with client_of(lambda _: Raw(sse(*vllm_chunks(SCRIPT)))) as (client, server):
        for schema, sent in (({}, {"json_object": True}), ({"type": "object"}, {"json": {"type": "object"}})):
            sample = await client.generate(place(schema=schema).order)
            assert sample.untrainable == "constrained" and sample.ids == SCRIPT
            assert server.asked[-1].body["sampling_params"]["structured_outputs"] == sent


# A real server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_model(tmp_path_factory) -> Path:
    """Random weights with heads as wide as vLLM's attention on a CPU wants them."""
    models = pytest.importorskip("engine.models", reason="the embedded engine needs its extra (torch)")
    transformers = pytest.importorskip("transformers")
    folder = models.prepare("tiny-random", tmp_path_factory.mktemp("models"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    kept = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept)).float().save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def running_vllm(model: Path, folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.pop("PYTHONPATH", None)
    words = [f"{VENV}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--served-model-name", "policy", "--max-model-len", "2048", "--dtype", "float32", "--enforce-eager"]
    words += ["--enable-scale-out", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "vllm.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(240):
            while not await asyncio.to_thread(_alive, url):
                assert process.returncode is None, (folder / "vllm.log").read_text()[-2000:]
                await asyncio.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)


def _alive(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def _post(url: str, body: dict | None = None) -> None:
    data, headers = json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=30).close()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not VENV, reason="POLAR_VLLM_VENV isn't set: a virtual environment with vllm-cpu 0.32")
async def test_a_real_vllm(real_model, tmp_path):
    async with running_vllm(real_model, tmp_path) as url:
        client = VLLM(url, 2048)
        try:
            whole = place(rid="c-1", limit=20, vocabulary=49152)
            sample = await client.generate(whole.order)
            assert sample.ids == whole.pieces and 0 < len(sample.ids) <= 20 and not sample.untrainable
            assert sample.versions == [VersionSpan("default", 0, len(sample.ids))]
            await _aborted(client)
            await _updated(client, url)
            with pytest.raises(CallError) as e:
                await client.generate(place(rid="c-9", prompt=[5] * 2100).order)
            assert e.value.kind == "context_overflow"
        finally:
            await client.close()


async def _aborted(client: VLLM) -> None:
    placed = place(rid="c-2", limit=1900, stop_ids=[])
    take = placed.order.tokens

    def tokens(new: list[int]) -> None:
        take(new)
        if len(placed.pieces) > 10:
            placed.order.cancel.set()

    placed.order.tokens = tokens
    sample = await asyncio.wait_for(client.generate(placed.order), 30)
    assert sample.end == "abort" and sample.ids == placed.pieces and not sample.untrainable
    assert sample.versions and len(sample.ids) < 1900


async def _updated(client: VLLM, url: str) -> None:
    """Pause with aborts, a new version, resume: one completion of two versions, with exact log-probabilities."""
    placed = place(rid="c-3", limit=300, stop_ids=[])
    task = asyncio.create_task(client.generate(placed.order))
    async with asyncio.timeout(30):
        while len(placed.pieces) < 20:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(_post, f"{url}/pause?mode=abort")
    await asyncio.to_thread(_post, f"{url}/update_weight_version", {"new_version": "v2", "weight_version": "v2"})
    await asyncio.to_thread(_post, f"{url}/resume")
    sample = await asyncio.wait_for(task, 60)
    assert sample.resumed >= 1 and sample.ids == placed.pieces and len(sample.logprobs) == len(sample.ids)
    assert not sample.untrainable and [v.version for v in sample.versions] == ["default", "v2"]
    assert sample.versions[-1].end == len(sample.ids) and sample.versions[0].end == sample.versions[1].start >= 20
