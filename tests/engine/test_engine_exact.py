"""Numbers against plain transformers: under batching, prefix reuse, chunks and retraction."""

import asyncio
import random
from collections import Counter

import pytest
import torch

TOLERANCE = 1e-4  # float32


def sampled(count: int, **params):
    return {"max_new_tokens": count, "ignore_eos": True, **params}


def long_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(20, 40_000), k=length)


def check(answer: dict, prompt: list[int], reference, temperature: float = 1.0) -> None:
    """An answer's log-probabilities are those of a teacher-forced pass over prompt and output."""
    output = answer["output_ids"]
    expected = reference(prompt + output, temperature)
    for index, (logprob, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        assert token == output[index]
        assert logprob == pytest.approx(expected[len(prompt) + index - 1, token].item(), abs=TOLERANCE)


async def test_logprobs_are_plain_transformers(client, plain):
    for temperature in (1.0, 0.4, 1.7):
        prompt = long_prompt(50, seed=1)
        params = sampled(20, temperature=temperature, top_p=0.9, top_k=50, min_p=0.001)
        answer = await client.generate(prompt, params=params, return_logprob=True)
        check(answer, prompt, plain, temperature)


async def test_greedy_takes_the_most_likely_and_reports_temperature_one(client, prompt, plain):
    answer = await client.generate(prompt, params=sampled(12, temperature=0), return_logprob=True)
    check(answer, prompt, plain)
    expected = plain(prompt + answer["output_ids"]).argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert answer["output_ids"] == expected


async def test_batching_changes_nothing(serve, plain):
    prompts = [long_prompt(length, seed=length) for length in (3, 40, 150, 700, 9, 300)]
    params = sampled(24, temperature=0)
    async with serve(prefix_entries=0, prefill_chunk=128) as client:
        alone = [await client.generate(prompt, params=params, return_logprob=True) for prompt in prompts]
        together = await asyncio.gather(
            *[client.generate(prompt, params=params, return_logprob=True) for prompt in prompts]
        )
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert one["output_ids"] == other["output_ids"]
        check(one, prompt, plain)
        check(other, prompt, plain)


async def test_prefix_reuse_changes_nothing(serve, plain):
    prompt = long_prompt(600, seed=2)
    params = sampled(16, temperature=0)
    async with serve() as client:
        first = await client.generate(prompt, params=params, return_logprob=True)
        # The next turn of an agent: everything so far and something new.
        turn = prompt + first["output_ids"] + long_prompt(40, seed=3)
        second = await client.generate(turn, params=params, return_logprob=True)
        assert second["meta_info"]["cached_tokens"] == len(prompt) + 15  # the last token was never computed
        # The same again, and a branch that shares only the beginning.
        again = await client.generate(turn, params=params, return_logprob=True)
        assert again["meta_info"]["cached_tokens"] == len(turn) - 1
        branch = prompt[:200] + long_prompt(100, seed=4)
        third = await client.generate(branch, params=params, return_logprob=True)
        assert third["meta_info"]["cached_tokens"] == 200
    async with serve(prefix_entries=0) as client:
        cold = await client.generate(turn, params=params, return_logprob=True)
        assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == second["output_ids"] == again["output_ids"]
    check(second, turn, plain)
    check(again, turn, plain)
    check(third, branch, plain)


async def test_a_group_computes_its_prompt_once(serve, plain):
    prompt = long_prompt(400, seed=5)
    async with serve(prefill_chunk=64) as client:
        answers = await client.generate(prompt, params=sampled(8, n=6), return_logprob=True)
        apart = await asyncio.gather(
            *[client.generate(prompt, params=sampled(8), return_logprob=True) for _ in range(4)]
        )
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in answers)
    assert cached[0] == 0 and cached[1] > len(prompt) - 32  # they don't wait for the last few
    assert all(answer["meta_info"]["cached_tokens"] == len(prompt) - 1 for answer in apart)
    for answer in (*answers, *apart):
        check(answer, prompt, plain)


async def test_prompt_logprobs_with_reuse_and_chunks(serve, plain):
    prompt = long_prompt(300, seed=6)
    expected = plain(prompt)
    async with serve(prefill_chunk=70) as client:
        for start in (0, 120, 0, 299, 300):
            answer = await client.generate(prompt, params=sampled(4), return_logprob=True, logprob_start_len=start)
            meta = answer["meta_info"]
            rows = meta["input_token_logprobs"]
            assert [row[1] for row in rows] == prompt[start:]
            assert meta["cached_tokens"] <= start
            for position, row in enumerate(rows[1:], start=start + 1):
                assert row[0] == pytest.approx(expected[position - 1, prompt[position]].item(), abs=TOLERANCE)
            check(answer, prompt, plain)


async def test_too_little_memory_retracts_and_changes_nothing(serve, plain):
    """Six sequences that can't all be held at once all finish, with the tokens they would have had."""
    prompts = [long_prompt(100, seed=seed) for seed in range(6)]
    params = sampled(150, temperature=0)
    async with serve(prefix_entries=0, context_length=400) as client:
        calm = await asyncio.gather(*[client.generate(prompt, params=params) for prompt in prompts])
    async with serve(kv_bytes=1, context_length=400) as client:  # the least it can have: one full sequence
        assert client.engine.scheduler.pool.budget == 464
        tight = await asyncio.gather(
            *[client.generate(prompt, params=params, return_logprob=True) for prompt in prompts]
        )
        pool = client.engine.scheduler.pool
        assert pool.used == pool.cached_tokens <= pool.budget
    assert sum(answer["meta_info"]["num_retractions"] for answer in tight) > 0
    for prompt, one, other in zip(prompts, calm, tight, strict=True):
        assert one["output_ids"] == other["output_ids"]
        check(other, prompt, plain)


async def test_memory_returns(client):
    prompts = [long_prompt(100, seed=seed) for seed in range(5)]
    await asyncio.gather(*[client.generate(prompt, params=sampled(20)) for prompt in prompts])
    pool = client.engine.scheduler.pool
    assert pool.used == pool.cached_tokens > 0
    assert (await client.call("/flush_cache"))[0] == 200
    assert pool.used == 0


async def test_seeds_reproduce_whatever_else_runs(client, prompt):
    params = sampled(24, sampling_seed=11)
    alone = await client.generate(prompt, params=params)
    crowd = [client.start(long_prompt(60, seed=seed), params=sampled(30)) for seed in range(5)]
    among = await client.generate(prompt, params=params)
    await asyncio.gather(*crowd)
    other = await client.generate(prompt, params=sampled(24, sampling_seed=12))
    free = [await client.generate(prompt, params=sampled(24)) for _ in range(2)]
    assert alone["output_ids"] == among["output_ids"]
    assert len({tuple(answer["output_ids"]) for answer in (alone, other, *free)}) == 4


async def test_samples_follow_the_distribution(client, prompt, plain):
    temperature, top_k = 0.5, 4
    row = plain(prompt, temperature)[-1]
    best = row.topk(top_k)
    expected = dict(zip(best.indices.tolist(), torch.softmax(best.values, -1).tolist(), strict=True))
    params = {"max_new_tokens": 1, "temperature": temperature, "top_k": top_k, "n": 128, "ignore_eos": True}
    counts: Counter = Counter()
    for seed in range(5):
        batch = await client.generate(prompt, params={**params, "sampling_seed": 1000 * seed})
        counts.update(answer["output_ids"][0] for answer in batch)
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        assert counts[token] / 640 == pytest.approx(probability, abs=0.08)  # over 4 standard deviations


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}, {"top_p": 1e-6}])
def test_filters_keep_what_they_should(filters):
    from engine.protocol import SamplingParams
    from engine.request import Request
    from engine.sampling import sample

    logits = torch.tensor([0.5, 2.0, 1.9, -1.0, 1.0, 0.0])
    probs = torch.softmax(logits, -1)
    order = probs.argsort(descending=True)
    kept = torch.ones(6, dtype=torch.bool)
    if "top_k" in filters:
        kept = torch.arange(6) < filters["top_k"]
    if "top_p" in filters:
        kept = probs[order].cumsum(0) - probs[order] <= filters["top_p"]
    if "min_p" in filters:
        kept = probs[order] >= filters["min_p"] * probs.max()
    allowed = set(order[kept].tolist())
    params = SamplingParams(sampling_seed=1, **filters)
    request = Request(rid="r", group="r", prompt=[1], params=params, limit=9, text=None)
    seen = {sample(logits[None].clone(), [request], frozenset())[0].token for _ in range(400)}
    assert seen == allowed
    result = sample(logits[None].clone(), [request], frozenset())[0]
    assert result.logprob == pytest.approx(probs[result.token].log().item(), abs=1e-6)  # before the filters
