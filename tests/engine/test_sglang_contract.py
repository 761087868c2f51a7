"""The embedded server against the real SGLang, on the wire: the same model folder, the same calls.

Needs SGLang in its own virtual environment, named by POLAR_SGLANG_VENV (compose/sglang-cpu/install.sh makes
one).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "compose" / "sglang-cpu"
VENV = os.environ.get("POLAR_SGLANG_VENV")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not VENV, reason=f"POLAR_SGLANG_VENV isn't set; install it with {RECIPE / 'install.sh'} VENV"),
]

# What SGLang says beyond the contract: internal timings.
EXTRAS = {
    "storage_prefetch_wait",
    "storage_staging_wait",
    "api_server_dispatch_finish_ts",
    "decode_throughput",
    "response_sent_to_client_ts",  # in a stream: in its first and last chunk only
}
TOLERANCE = 1e-3


def _request(url: str, path: str, body=None, method: str | None = None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def sglang(tiny, tmp_path_factory):
    """The URL of a real SGLang server with tiny-random in float32."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("sglang") / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [RECIPE / "start.sh", VENV, tiny, str(port), "--weight-version", "v0", "--enable-metrics"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while "ready to roll" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"SGLang didn't start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
async def both(client, sglang):
    """f(path, body, method) -> the two (status, text), ours first."""

    async def call(path: str, body=None, method: str | None = None):
        ours = asyncio.to_thread(_request, client.url, path, body, method)
        theirs = asyncio.to_thread(_request, sglang, path, body, method)
        return await ours, await theirs

    # Other tests may have left the reference paused or at another version.
    await asyncio.to_thread(_request, sglang, "/continue_generation", {})
    await asyncio.to_thread(_request, sglang, "/update_weight_version", {"new_version": "v0"})
    await asyncio.to_thread(_request, sglang, "/flush_cache", {})
    return call


def same(ours, theirs, where: str = "") -> None:
    """Equal in shape and value; log-probabilities within the tolerance, ids and timings of any value."""
    if isinstance(theirs, dict):
        extra = EXTRAS if where.endswith("meta_info") else set()
        assert set(ours) - extra == set(theirs) - extra, where
        for key, value in ours.items():
            timing = where.endswith("meta_info") and key.endswith(("_time", "_ts", "latency"))
            if not timing and key not in extra and not (key == "id" and "meta_info" in where):
                same(value, theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{where}[{index}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=TOLERANCE), where
    else:
        assert ours == theirs, where


GREEDY = {"temperature": 0, "max_new_tokens": 24}
IDS = [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
CALLS = {
    "greedy": {"sampling_params": GREEDY, "return_logprob": True},
    "no logprobs": {"sampling_params": GREEDY},
    "whole prompt": {"sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0},
    "part of the prompt": {"sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 4},
    "score": {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0},
    "alternatives": {
        "sampling_params": GREEDY,
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 6],
        "logprob_start_len": 2,
    },
    "texts": {"sampling_params": GREEDY, "return_logprob": True, "return_text_in_logprobs": True},
    "prompt ids": {"sampling_params": GREEDY, "return_prompt_token_ids": True},
    "one choice": {
        "sampling_params": {"top_k": 1, "temperature": 0.6, "max_new_tokens": 9},
        "return_logprob": True,
    },
    "ignore_eos": {"sampling_params": {**GREEDY, "ignore_eos": True, "min_new_tokens": 3}},
    "null values": {"sampling_params": {**GREEDY, "top_p": None, "stop": None}},
    "unknown field": {"sampling_params": GREEDY, "made_up": True},
    "id": {"sampling_params": GREEDY, "rid": "mine"},
}


@pytest.mark.parametrize("name", CALLS)
async def test_generate(both, name):
    ours, theirs = await both("/generate", {"input_ids": IDS, **CALLS[name]})
    assert ours[0] == theirs[0] == 200, (ours, theirs)
    same(json.loads(ours[1]), json.loads(theirs[1]))


async def test_batch_and_text(both):
    for body in ({"input_ids": [IDS, IDS[:4]]}, {"text": "<|im_start|>user\nhello 12"}):
        ours, theirs = await both("/generate", {**body, "sampling_params": GREEDY, "return_logprob": True})
        same(json.loads(ours[1]), json.loads(theirs[1]))


async def test_stops(both):
    free = json.loads((await both("/generate", {"input_ids": IDS, "sampling_params": GREEDY}))[1][1])
    token = free["output_ids"][3]
    piece = free["text"][6:12]
    for params in (
        {"stop_token_ids": [token]},
        {"stop_token_ids": [token], "no_stop_trim": True},
        {"stop_token_ids": [token], "skip_special_tokens": False},
        {"stop": piece},
        {"stop": ["never", piece], "no_stop_trim": True},
        {"stop_token_ids": [token], "ignore_eos": True},
    ):
        ours, theirs = await both("/generate", {"input_ids": IDS, "sampling_params": {**GREEDY, **params}})
        same(json.loads(ours[1]), json.loads(theirs[1]), str(params))


async def test_prefix_reuse(both):
    body = {"input_ids": IDS * 20, "sampling_params": GREEDY, "return_logprob": True}
    for _ in range(2):
        ours, theirs = await both("/generate", body)
        same(json.loads(ours[1]), json.loads(theirs[1]))
    turn = {**body, "input_ids": IDS * 20 + json.loads(ours[1])["output_ids"] + [7, 8, 9]}
    ours, theirs = await both("/generate", turn)
    same(json.loads(ours[1]), json.loads(theirs[1]))


async def test_stream(both):
    body = {"input_ids": IDS, "sampling_params": GREEDY, "return_logprob": True, "stream": True}
    ours, theirs = await both("/generate", body)
    streams = [text.split("\n\n") for _, text in (ours, theirs)]
    for events in streams:
        assert events[-2:] == ["data: [DONE]", ""]
    chunks = [[json.loads(event[6:]) for event in events[:-2]] for events in streams]
    same(chunks[0][-1], chunks[1][-1])
    by_length = {len(chunk["output_ids"]): chunk for chunk in chunks[1]}
    for chunk in chunks[0]:
        if len(chunk["output_ids"]) in by_length:
            same(chunk, by_length[len(chunk["output_ids"])])


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": []},
        {},
        {"input_ids": [5] * 32_768},
        {"input_ids": IDS, "sampling_params": {"made_up": 1}},
        {"input_ids": IDS, "sampling_params": {"max_new_tokens": "x"}},
        {"input_ids": IDS, "sampling_params": {"temperature": -1}},
        {"input_ids": IDS, "sampling_params": {"top_p": 0}},
        {"input_ids": IDS, "sampling_params": {"top_k": 0}},
        {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 11},
    ],
)
async def test_refusals_have_the_same_status(both, body):
    ours, theirs = await both("/generate", body)
    assert ours[0] == theirs[0] == 400
    assert "message" in json.loads(ours[1])["error"]
    if body.get("input_ids") == [5] * 32_768 or body.get("input_ids") == []:
        assert json.loads(ours[1])["error"]["message"] == json.loads(theirs[1])["error"]["message"]


async def test_tokenizer(both):
    for path, body in (
        ("/tokenize", {"prompt": "it's 12 o'clock\n  日本 🎉 <|im_end|>"}),
        ("/tokenize", {"prompt": ["a", "b c"]}),
        ("/tokenize", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}),
        ("/detokenize", {"tokens": IDS}),
        ("/detokenize", {"tokens": IDS, "skip_special_tokens": False}),
        ("/detokenize", {"tokens": [IDS, IDS[:3]]}),
    ):
        ours, theirs = await both(path, body)
        same(json.loads(ours[1]), json.loads(theirs[1]), path)


async def test_status(both):
    ours, theirs = (json.loads(answer[1]) for answer in await both("/model_info"))
    assert set(ours) <= set(theirs)
    for key in (
        "model_path",
        "tokenizer_path",
        "weight_version",
        "is_generation",
        "model_type",
        "architectures",
    ):
        assert ours[key] == theirs[key]
    ours, theirs = (json.loads(answer[1])["data"][0] for answer in await both("/v1/models"))
    assert set(ours) == set(theirs) and ours["max_model_len"] == theirs["max_model_len"]
    for path in ("/health", "/health_generate", "/ready"):
        ours, theirs = await both(path)
        assert ours[0] == theirs[0] == 200
    ours, theirs = await both("/metrics")

    def names(text: str) -> set[str]:
        return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE sglang:")}

    assert {name for name in names(ours[1]) if not name.endswith("_created")} - names(theirs[1]) <= {
        "sglang:num_aborted_requests_total",  # SGLang shows these once they have happened
        "sglang:num_retracted_requests_total",
        "sglang:cached_tokens_total",
    }


async def test_control_answers(both, other, tiny):
    for path, body in (
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/pause_generation", {}),
        ("/continue_generation", {}),
        ("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v1"}),
        ("/update_weights_from_disk", {"model_path": str(tiny), "weight_version": "v2"}),
        ("/update_weight_version", {"new_version": "v3"}),
    ):
        ours, theirs = await both(path, body)
        assert ours[0] == theirs[0] == 200
        assert json.loads(ours[1]) == json.loads(theirs[1]), path
        if path == "/update_weights_from_disk":
            call = {"input_ids": IDS, "sampling_params": GREEDY, "return_logprob": True}
            ours, theirs = await both("/generate", call)
            same(json.loads(ours[1]), json.loads(theirs[1]), body["model_path"])
    ours, theirs = await both("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "v9"})
    assert ours[0] == theirs[0] == 400
    assert set(json.loads(ours[1])) == set(json.loads(theirs[1]))
    for path in ("/abort_request", "/flush_cache"):
        ours, theirs = await both(path, {})
        assert ours[0] == theirs[0] == 200
    assert (await both("/pause_generation", {"mode": "x"}))[0][0] == 400


async def test_an_abort_answers_with_what_there_is(both, client, sglang):
    body = {"input_ids": IDS, "rid": "gone", "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 30_000, "ignore_eos": True}
    answers = []
    for url in (client.url, sglang):
        task = asyncio.create_task(asyncio.to_thread(_request, url, "/generate", body))
        await asyncio.sleep(1)
        await asyncio.to_thread(_request, url, "/abort_request", {"rid": "gone"})
        status, text = await task
        assert status == 200
        answers.append(json.loads(text))
    for answer in answers:
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) > 0
    ours, theirs = (answer["meta_info"]["finish_reason"] for answer in answers)
    assert set(ours) == set(theirs) and ours["type"] == theirs["type"] == "abort"
    assert ours["status_code"] is theirs["status_code"] is None


async def test_weights_change_in_the_middle(both, client, sglang, other, tiny):
    body = {"input_ids": IDS, "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0}
    update = {"model_path": str(other), "weight_version": "v1", "flush_cache": True}
    answers = []
    for url in (client.url, sglang):
        task = asyncio.create_task(asyncio.to_thread(_request, url, "/generate", body))
        await asyncio.sleep(0.7)
        for path, data in (
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", update),
            ("/continue_generation", {}),
        ):
            status, text = await asyncio.to_thread(_request, url, path, data)
            assert status == 200, text
        answers.append(json.loads((await task)[1])["meta_info"])
    await asyncio.to_thread(_request, sglang, "/update_weights_from_disk", {"model_path": str(tiny)})
    for meta in answers:
        first, second = meta["weight_versions"]
        assert (first["version"], first["start"]) == ("v0", 0)
        assert (second["version"], second["start"], second["end"]) == ("v1", first["end"], 1500)
        assert meta["weight_version"] == "v1" and meta["num_retractions"] == 1
