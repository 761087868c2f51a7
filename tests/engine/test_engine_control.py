"""Abort, pause, weight updates, limits, metrics, authorisation."""

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

LONG = {"max_new_tokens": 20_000, "ignore_eos": True, "temperature": 0}


def gate(client, delay: float = 0.004):
    """Slow a server's forward passes down so that a test can act in the middle of a generation."""
    import time

    forward = client.engine.model.forward

    def slow(work):
        time.sleep(delay)
        return forward(work)

    client.engine.model.forward = slow


async def test_abort_a_running_request(client, prompt):
    task = client.start(prompt, params=LONG, rid="a-1", return_logprob=True)
    await client.running(tokens=5)
    assert (await client.call("/abort_request", {"rid": "a-1"}))[0] == 200
    answer = await task
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert len(answer["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"]) >= 5
    assert meta["weight_versions"][0]["end"] == meta["completion_tokens"]
    assert await client.metric("num_aborted_requests_total") == 1


async def test_abort_a_queued_request(serve, prompt):
    async with serve(max_running=1) as client:
        first = client.start(prompt, params=LONG, rid="first")
        await client.running()
        second = client.start(prompt, params=LONG, rid="second")
        await client.until(lambda: "second" in client.engine.live)
        await client.call("/abort_request", {"rid": "second"})
        answer = await second
        assert answer["output_ids"] == [] and answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert not first.done()
        await client.call("/abort_request", {"abort_all": True})
        await first


async def test_abort_by_prefix_needs_a_live_request_of_that_name(client, prompt):
    """SGLang's rule: an id that isn't live is ignored; a live one takes along all that begin with it."""
    tasks = {rid: client.start(prompt, params=LONG, rid=rid) for rid in ("x-1", "x-10", "y")}
    await client.running(count=3)
    await client.call("/abort_request", {"rid": "x"})
    await client.call("/abort_request", {"rid": ""})
    await client.call("/abort_request", {})
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks.values())
    await client.call("/abort_request", {"rid": "x-1"})
    await tasks["x-1"]
    await tasks["x-10"]
    assert not tasks["y"].done()
    await client.call("/abort_request", {"abort_all": True})
    await tasks["y"]


async def test_abort_a_group(client, prompt):
    task = client.start(prompt, params={**LONG, "n": 3}, rid="g")
    await client.running(count=3)
    await client.call("/abort_request", {"rid": "g"})
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in await task] == ["abort"] * 3


async def test_an_aborted_stream_ends(client, prompt):
    task = asyncio.create_task(client.stream(prompt, params=LONG, rid="s"))
    await client.running(tokens=3)
    await client.call("/abort_request", {"rid": "s"})
    chunks = await task
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts(client, prompt, stream):
    task = client.start(prompt, params=LONG, stream=stream)
    await client.running(tokens=3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.until(lambda: not client.engine.scheduler.running, seconds=1)
    assert not client.engine.live


async def test_pause_abort_then_continue(client, prompt):
    running = client.start(prompt, params=LONG)
    await client.running()
    status, answer = await client.call("/pause_generation", {})
    assert (status, answer["status"]) == (200, "ok")
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    waiting = client.start(prompt, params={"max_new_tokens": 3, "ignore_eos": True})
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert (await client.call("/health_generate", method="GET"))[0] == 200
    await client.call("/continue_generation", {})
    assert len((await waiting)["output_ids"]) == 3
    assert (await client.call("/pause_generation", {"mode": "nonsense"}))[0] == 400


async def test_abort_while_paused(client, prompt):
    task = client.start(prompt, params=LONG, rid="p")
    await client.running(tokens=2)
    await client.call("/pause_generation", {"mode": "in_place"})
    held = len(client.engine.live["p"].output)
    await asyncio.sleep(0.05)
    assert len(client.engine.live["p"].output) == held
    await client.call("/abort_request", {"rid": "p"})
    assert len((await task)["output_ids"]) == held


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("in_place", True), ("retract", True)])
async def test_weights_change_in_the_middle(client, prompt, plain, tiny, other, mode, flush):
    gate(client)
    task = client.start(prompt, params={**LONG, "max_new_tokens": 40}, return_logprob=True)
    await client.running(tokens=10)
    await client.call("/pause_generation", {"mode": mode})
    body = {"model_path": str(other), "weight_version": "v1", "flush_cache": flush}
    status, update = await client.call("/update_weights_from_disk", body)
    assert (status, update["success"], update["num_paused_requests"]) == (200, True, 1)
    assert not task.done()
    await client.call("/continue_generation", {})
    answer = await task
    meta, output = answer["meta_info"], answer["output_ids"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"]) == ("v0", 0)
    assert (second["version"], second["end"]) == ("v1", 40)
    switch = first["end"]
    assert second["start"] == switch >= 10
    assert meta["weight_version"] == "v1"
    assert meta["num_retractions"] == (1 if flush else 0)
    before, after = plain(prompt + output), plain(prompt + output, folder=other)
    for index, (logprob, token, _) in enumerate(meta["output_token_logprobs"]):
        old = before[len(prompt) + index - 1, token].item()
        new = after[len(prompt) + index - 1, token].item()
        if index < switch:
            assert logprob == pytest.approx(old, abs=1e-4)
        elif flush:  # recomputed with the new weights
            assert logprob == pytest.approx(new, abs=1e-4)
        else:  # new weights on old keys and values: neither
            assert abs(logprob - old) > 1e-4
    # What was made with old keys and values isn't reused.
    again = await client.generate(prompt, params={**LONG, "max_new_tokens": 4}, return_logprob=True)
    expected = plain(prompt + again["output_ids"], folder=other)
    for index, (logprob, token, _) in enumerate(again["meta_info"]["output_token_logprobs"]):
        assert logprob == pytest.approx(expected[len(prompt) + index - 1, token].item(), abs=1e-4)


async def test_an_update_waits_for_what_runs_and_holds_what_comes(client, prompt, other):
    gate(client)
    early = client.start(prompt, params={**LONG, "max_new_tokens": 60})
    await client.running()
    body = {"model_path": str(other), "weight_version": "v1"}
    update = asyncio.create_task(client.call("/update_weights_from_disk", body))
    await client.until(lambda: client.engine.scheduler.barrier is not None or update.done())
    late = client.start(prompt, params={**LONG, "max_new_tokens": 3})
    answer = await early
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["v0"]
    assert (await update)[0] == 200
    assert [span["version"] for span in (await late)["meta_info"]["weight_versions"]] == ["v1"]
    _, info = await client.call("/model_info", method="GET")
    assert info["weight_version"] == "v1"


async def test_an_update_can_abort_what_runs(client, prompt, other):
    task = client.start(prompt, params=LONG)
    await client.running()
    body = {"model_path": str(other), "abort_all_requests": True}
    status, _ = await client.call("/update_weights_from_disk", body)
    assert status == 200
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.engine.version == "v0"  # no new name was given


async def test_an_update_drops_the_prefix_cache(client, prompt, other):
    params = {**LONG, "max_new_tokens": 2}
    await client.generate(prompt, params=params)
    assert (await client.generate(prompt, params=params))["meta_info"]["cached_tokens"] == len(prompt) - 1
    await client.call("/update_weights_from_disk", {"model_path": str(other)})
    assert (await client.generate(prompt, params=params))["meta_info"]["cached_tokens"] == 0


def _broken(folder, target, change):
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")


def _nan(weights):
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")


def _missing(weights):
    del weights["model.norm.weight"]


def _unknown(weights):
    weights["model.extra"] = torch.zeros(3)


def _shape(weights):
    weights["model.norm.weight"] = torch.ones(65)


@pytest.mark.parametrize("change", [_nan, _missing, _unknown, _shape])
async def test_a_bad_update_changes_nothing(client, prompt, other, tmp_path, change):
    params = {**LONG, "max_new_tokens": 6}
    before = await client.generate(prompt, params=params, return_logprob=True)
    _broken(other, tmp_path / "bad", change)
    body = {"model_path": str(tmp_path / "bad"), "weight_version": "v1"}
    status, answer = await client.call("/update_weights_from_disk", body)
    assert status == 400 and answer["success"] is False and "model." in answer["message"]
    await client.call("/flush_cache")
    after = await client.generate(prompt, params=params, return_logprob=True)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    assert after["meta_info"]["weight_version"] == "v0"


async def test_other_bad_updates(client, tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(tiny, tmp_path / "heads")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "heads" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    shutil.copytree(tiny, tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0half")
    for name in ("nowhere", "empty", "heads", "torn"):
        status, answer = await client.call("/update_weights_from_disk", {"model_path": str(tmp_path / name)})
        assert status == 400, name
        assert answer["success"] is False and name in answer["message"]


async def test_the_version_is_a_label(client, prompt):
    task = client.start(prompt, params=LONG)
    await client.running()
    status, answer = await client.call("/update_weight_version", {"new_version": "v7"})
    assert (status, answer["new_version"]) == (200, "v7")
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    params = {**LONG, "max_new_tokens": 2}
    assert (await client.generate(prompt, params=params))["meta_info"]["weight_version"] == "v7"


async def test_flush_is_refused_while_requests_run(client, prompt):
    task = client.start(prompt, params=LONG)
    await client.running()
    assert (await client.call("/flush_cache"))[0] == 400
    flush = asyncio.create_task(client.call("/flush_cache?timeout=10", method="GET"))
    await client.call("/abort_request", {"abort_all": True})
    await task
    assert (await flush)[0] == 200


async def test_a_full_queue_answers_503(serve, prompt):
    async with serve(max_running=1, max_queued=2) as client:
        tasks = [client.start(prompt, params=LONG)]
        await client.running()
        tasks += [client.start(prompt, params=LONG) for _ in range(2)]
        await client.until(lambda: len(client.engine.live) == 3)
        answer = await client.generate(prompt, status=503)
        assert answer["error"]["message"] == "The request queue is full."
        assert (await client.call("/health", method="GET"))[0] == 200
        await client.generate(prompt, params={"n": 128}, status=503)
        await client.call("/abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)
        await client.generate(prompt, params={"max_new_tokens": 1})


async def test_logits_that_are_not_numbers(client, prompt):
    forward = client.engine.model.forward
    client.engine.model.forward = lambda work: forward(work) * float("nan")
    answer = await client.generate(prompt, status=500)
    assert "NaN" in answer["error"]["message"]
    chunks = await client.stream(prompt)
    assert chunks[-1]["meta_info"]["finish_reason"]["status_code"] == 500
    client.engine.model.forward = forward
    await client.generate(prompt, params={"max_new_tokens": 2})


async def test_a_failing_forward_pass_fails_its_batch_only(client, prompt):
    forward = client.engine.model.forward

    def fail(work):
        raise MemoryError("no room")

    client.engine.model.forward = fail
    answer = await client.generate(prompt, status=500)
    assert "no room" in answer["error"]["message"]
    client.engine.model.forward = forward
    await client.generate(prompt, params={"max_new_tokens": 2})
    pool = client.engine.scheduler.pool
    assert pool.used == pool.cached_tokens


async def test_the_tokens_metric_counts_every_sampled_token(client, prompt):
    answers = [await client.generate(prompt, params={"max_new_tokens": 5, "ignore_eos": True, "n": 2})]
    task = client.start(prompt, params=LONG, rid="a")
    await client.running(tokens=3)
    await client.call("/abort_request", {"rid": "a"})
    answers.append([await task])
    await client.call("/health_generate", method="GET")  # doesn't count
    lost = client.start(prompt, params=LONG, rid="lost")
    await client.running(tokens=3)
    request = client.engine.live["lost"]
    lost.cancel()
    await client.until(lambda: request.view.finish is not None)
    total = sum(len(answer["output_ids"]) for group in answers for answer in group) + len(request.output)
    await client.until(lambda: not client.engine.scheduler.running)
    assert await client.metric("generation_tokens_total") == total
    assert await client.metric("prompt_tokens_total") == 4 * len(prompt)
    assert await client.metric("cached_tokens_total") > 0
    assert await client.metric("num_running_reqs") == await client.metric("num_queue_reqs") == 0
    assert await client.metric("time_to_first_token_seconds_count") == 4


async def test_api_key(serve, prompt):
    async with serve(api_key="secret") as client:
        assert (await client.call("/generate", {"input_ids": prompt}))[0] == 401
        wrong = {"Authorization": "Bearer other"}
        assert (await client.call("/pause_generation", {}, headers=wrong))[0] == 401
        assert (await client.call("/health", method="GET"))[0] == 200
        right = {"Authorization": "Bearer secret"}
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        assert (await client.call("/generate", body, headers=right))[0] == 200
        _, info = await client.call("/server_info", method="GET", headers=right)
        assert "secret" not in str(info)


async def test_stopping_answers_what_runs(serve, prompt):
    async with serve() as client:
        task = client.start(prompt, params=LONG)
        await client.running(tokens=3)
        assert await client.engine.stop()
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        await client.generate(prompt, status=503)
