"""Many calls at once, several proxies for one session, and what a call may cost: completion and correctness, never times."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from polar import arrays
from polar.completion import Completion
from proxy.attempt import Attempts
from proxy.quick import QuickTokenizer, quick
from tests.proxy.fake_engine import Reply

CHAT = "/v1/chat/completions"


async def ask(http: aiohttp.ClientSession, url: str, messages: list[dict], stream: bool = False) -> str:
    async with http.post(url + CHAT, json={"model": "m", "messages": messages, "stream": stream}) as response:
        data = await response.read()
        assert response.status == 200, data
    if not stream:
        return json.loads(data)["choices"][0]["message"]["content"]
    events = [e[6:] for e in data.decode().split("\n\n") if e]
    assert events.pop() == "[DONE]"
    return "".join(c["delta"].get("content") or "" for e in events for c in json.loads(e)["choices"])


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def test_many_sessions_at_once(world):
    """Every stream is whole, nobody gets another's answer, and every token sampled is stored."""
    n, turns = 60, 3
    said: dict[str, str] = {}

    def reply(body: dict) -> Reply:
        said[body["rid"]] = f"Answer {len(said)}."
        return Reply(ids=world.ids(said[body["rid"]]))

    world.engine.default = reply
    grants = [world.mint(f"t.s{i}") for i in range(n)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def session(i: int) -> None:
            messages: list[dict] = []
            for t in range(turns):
                messages.append(user(f"session {i}, turn {t}"))
                answer = await ask(http, f"{world.server.url}/s/{grants[i][0]}", messages, stream=bool(i % 2))
                messages.append({"role": "assistant", "content": answer})
            stored = world.stored(grants[i][1])
            assert [m["content"] for m in messages[1::2]] == [said[c.completion_id] for c in stored]
            assert [c.link for c in stored] == ["first", "continued", "continued"]

        await asyncio.gather(*(session(i) for i in range(n)))
    sampled = sum(len(c.sampled_ids) for _, g in grants for c in world.stored(g))
    assert sampled == world.engine.sampled
    world.check_prompts(grants[7][1])


async def test_two_proxies_serve_one_session_in_turn(bare_world):
    """Each learns of what the other stored, with the registration of its own call."""
    world = bare_world
    proxies = [await world.serve() for _ in range(2)]
    capability, grant = world.mint()
    messages: list[dict] = []
    async with aiohttp.ClientSession() as http:
        for t in range(7):
            messages.append(user(f"turn {t}"))
            world.says(f"Answer {t}.")
            proxy = proxies[t % 2 if t < 4 else t // 2 % 2]
            answer = await ask(http, f"{proxy.url}/s/{capability}", messages)
            assert answer == f"Answer {t}."
            messages.append({"role": "assistant", "content": answer})
    stored = world.stored(grant)
    assert [c.link for c in stored] == ["first"] + ["continued"] * 6
    assert [c.index for c in stored] == list(range(7)) and world.store.usage(grant.attempt_id)[0].turns == 7
    assert not world.redis.hgetall(world.store.keys.inflight(grant.attempt_id))
    world.check_prompts(grant)


async def test_the_turn_limit_holds_over_two_proxies(bare_world):
    world = bare_world
    one, two = await world.serve(), await world.serve()
    capability, grant = world.mint(max_turns=2)
    async with aiohttp.ClientSession() as http:
        world.says("First.")
        assert await ask(http, f"{two.url}/s/{capability}", [user("a")]) == "First."
        world.says("Last.")
        assert await ask(http, f"{one.url}/s/{capability}", [user("b")]) == "Last."
        async with http.post(f"{two.url}/s/{capability}{CHAT}", json={"messages": [user("c")]}) as response:
            assert response.status in (400, 403) and "turn" in await response.text()
    assert world.store.usage(grant.attempt_id)[1] == "turn_limit"
    assert len(world.stored(grant)) == 2 and len(world.engine.served) == 2


async def test_a_turn_costs_two_round_trips(world):
    capability, _ = world.mint()
    messages: list[dict] = []
    calls = {}
    async with aiohttp.ClientSession() as http:
        for t in range(6):
            if t == 2:
                world.redis.config_resetstat()
            messages.append(user(f"turn {t}"))
            world.says(f"Answer {t}.")
            messages.append(
                {"role": "assistant", "content": await ask(http, f"{world.server.url}/s/{capability}", messages)}
            )
    stats = world.redis.info("commandstats")
    calls = {name: s["calls"] for name, s in stats.items()}
    assert calls["cmdstat_evalsha"] == 2 * 4
    assert not {"cmdstat_xrange", "cmdstat_get", "cmdstat_xrevrange"} & calls.keys()


def test_a_node_holds_its_own_tokens_only():
    prompt = arrays.ids(range(10_000))
    attempt = Attempts().get("s.1")
    node = attempt.add(
        Completion(
            completion_id="c",
            session_id="s",
            attempt=1,
            index=0,
            prompt_tail=prompt[9_990:],
            sampled_ids=arrays.ids([1]),
            logprobs=arrays.floats([]),
            messages=[user("x")],
            response={"role": "assistant", "content": "y"},
        )
    )
    assert node is not None and node.tail.base is None and node.tail.tolist() == list(range(9_990, 10_000))


async def test_idle_attempts_leave_memory():
    attempts = Attempts(limit=100_000, idle=3600)
    for n in range(2000):
        attempt = attempts.get(f"s{n}.1")
        attempt.add(
            Completion(
                completion_id=f"c{n}",
                session_id=f"s{n}",
                attempt=1,
                index=0,
                prompt_tail=arrays.ids(range(500)),
                sampled_ids=arrays.ids(range(50)),
                logprobs=arrays.floats([]),
                messages=[user("x")],
                response={"role": "assistant", "content": "y"},
            )
        )
    assert sum(a.tokens for a in attempts) <= 100_000 + 64 * 2000
    attempts.idle = 0.0
    for _ in range(64):
        attempts.get("s1999.1")
    assert sum(a.tokens for a in attempts) <= 100_000 // 8
    assert attempts.peek("s1999.1") is not None and attempts.peek("s0.1") is None


def test_quick_tokenizers_agree(tokenizer_folder):
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(tokenizer_folder)
    fast = quick(AutoTokenizer.from_pretrained(tokenizer_folder))
    assert isinstance(fast, QuickTokenizer)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    for text in (
        "",
        "a",
        " <|im_start|>user\nGo 箱 🎁<|im_end|>\n",
        "x" * 100,
        "<think> \n\n</think> the lazy dog. " * 40,
    ):
        for _ in range(2):
            ids = fast.encode(text, add_special_tokens=False)
            assert ids == slow.encode(text, add_special_tokens=False)
            assert fast.decode(ids, **options) == slow.decode(ids, **options) == text
            ids.append(1)  # what is handed out is the caller's
    assert fast.encode("a b") == slow.encode("a b") and fast.eos_token_id == slow.eos_token_id
    assert fast.decode(slow.encode("a<|im_end|>"), skip_special_tokens=True) == "a"
