"""The official JavaScript SDKs against the proxy: js/client.mjs holds a conversation in each and says what it was given."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.engines import pool
from tests.proxy.js_sdks import HERE, OFFICIAL, OPENCODE, SDKS, VERCEL, Running, hold, job

pytestmark = pytest.mark.harness


@pytest.fixture(scope="module")
def packages() -> Path:
    """The folder of POLAR_JS_SDKS, which js/install.sh fills."""
    value = os.environ.get("POLAR_JS_SDKS", "")
    if not value:
        pytest.skip("POLAR_JS_SDKS (folder made by tests/proxy/js/install.sh) is not set")
    folder = Path(value)
    complete = folder / ".complete"
    if not complete.is_file() or complete.read_bytes() != (HERE / "package-lock.json").read_bytes():
        pytest.skip(f"POLAR_JS_SDKS ({folder}) lacks the pinned packages: fill it with tests/proxy/js/install.sh")
    return folder


@pytest.fixture
async def roomy(bare_world) -> Any:
    """A world whose model takes long arguments."""
    row = bare_world.settings.models["policy"]
    bare_world.settings.models["policy"] = msgspec.structs.replace(row, context_length=60_000, max_new_tokens=20_000)
    await bare_world.serve(heartbeat=0.2)
    bare_world.engine.incremental = True
    return bare_world


# What is sampled ------------------------------------------------------------------------------------------------------

LONG = 'Grüße 📄👩‍👩‍👧 箱\u2028\\"\n </tool> ' * 60
CALLS = [("run", {"command": LONG}), ("look", {"command": "é 📄 </b>"}), ("run", {})]
# finish reasons of: an answer with calls, a finished one, a cut one
ENDS = {
    "openaiChat": ("tool_calls", "stop", "length"),
    "openaiResponses": ("tool_calls", "completed", "max_output_tokens"),
    "anthropic": ("tool_use", "end_turn", "max_tokens"),
    "google": ("STOP", "STOP", "MAX_TOKENS"),
    **dict.fromkeys(VERCEL + OPENCODE, ("tool-calls", "stop", "length")),
}


def sample(*calls: tuple[str, dict], thought: str = "I  thïnk 🤔.", text: str = "") -> str:
    out = f"<think>\n{thought}\n</think>{text}"
    for name, arguments in calls:
        told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        out += f"\n<tool_call>\n{told}\n</tool_call>"
    return out


_OWN = {"id", "call_id", "created", "created_at", "signature", "encrypted_content", "responseId", "toolCallId"}
# Only a stream's helper, or only the whole answer, has these.
_ASIDE = {
    "itemId",
    "reasoningEncryptedContent",
    "parsed",
    "parsed_arguments",
    "parsed_output",
    "output_parsed",
    "sdkHttpResponse",
}


def plain(value: Any) -> Any:
    """A typed result without what differs from one sample to the next."""
    if isinstance(value, list):
        # How a stream began is not part of the message.
        return [plain(v) for v in value if not (isinstance(v, dict) and v.get("kind") == "anthropic.message_start")]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in _OWN | _ASIDE}
    return value


@pytest.mark.parametrize("sdk", SDKS)
async def test_conversations_in_streams_and_whole(roomy, packages, sdk):
    """Reasoning, text, parallel calls, their results, a cut answer: typed the same in both modes, captured, and continued."""
    world, steps = roomy, ["List the files.", ["a.txt 📄", "", "no such file"], "Tell more."]
    held, grants = [], []
    for stream in (False, True):
        capability, grant = world.mint(f"t.s{int(stream)}")
        world.says(sample(*CALLS, text="Grüße, 👩‍👩‍👧."))
        world.says(sample(text="One  file: é."))
        world.says("The quick brown fox", end=False).end = "length"
        (said,) = await hold(packages, sdk, job(world, capability, steps, stream=stream))
        assert said["error"] is None and said["statuses"] == [200] * 3
        held.append(said["turns"])
        grants.append(grant)
    seen = (
        "" if sdk in ("vercelResponses", "opencodeResponses") else "I  thïnk 🤔."
    )  # it reads summaries of reasoning only
    for turns, grant, stream in zip(held, grants, (False, True), strict=True):
        assert [t["reasoning"] for t in turns] == [seen, seen, ""]
        assert [t["text"].rstrip("\n") for t in turns] == ["Grüße, 👩‍👩‍👧.", "One  file: é.", "The quick brown fox"]
        assert [(c["name"], c["arguments"]) for c in turns[0]["calls"]] == CALLS
        assert turns[1]["calls"] == turns[2]["calls"] == []
        assert tuple(t["finish"] for t in turns) == ENDS[sdk]
        if stream:
            assert [t["deltas"] for t in turns] == [{"text": t["text"], "reasoning": t["reasoning"]} for t in turns]
        stored = world.stored(grant)
        assert [c.link for c in stored] == ["first", "continued", "continued"], [c.link_reason for c in stored]
        assert [c.parent_id for c in stored] == [None, *(c.completion_id for c in stored[:2])]
        assert [c.stream for c in stored] == [stream] * 3 and not any(c.untrainable for c in stored)
        assert [c["id"] for c in stored[0].response["tool_calls"]] == [c["id"] for c in turns[0]["calls"]]
        assert [m["content"] for m in stored[1].messages] == steps[1]
        thoughts = len(world.ids("<think>\nI  thïnk 🤔.\n</think>", end=False))
        for turn, c, n in zip(turns, stored, (thoughts, thoughts, 0), strict=True):
            assert turn["usage"] == [c.prompt_length, 3, len(c.sampled_ids), n]
        world.check_prompts(grant)
    if sdk == "opencodeChat":  # puts the reasoning of a whole answer behind its text
        for turn in (t for turns in held for t in turns):
            turn["final"][0]["content"].sort(key=lambda p: p["type"] != "reasoning")
    assert plain(held[0]) == [{**t, "deltas": w["deltas"]} for t, w in zip(plain(held[1]), plain(held[0]), strict=True)]


@pytest.mark.parametrize("sdk", [s for s in OFFICIAL + VERCEL if s != "openaiResponses"])
async def test_the_sdks_own_tool_loops_run_through(world, packages, sdk):
    jobs, grants = [], []
    for stream in (False, True):
        capability, grant = world.mint(f"t.s{int(stream)}")
        grants.append(grant)
        world.says(sample(("run", {"command": "ls"}), ("run", {"command": "é"}), text="I  look."))
        world.says(sample(("run", {"command": "cat"})))
        world.says(sample(text="done 📄"))
        jobs.append(job(world, capability, ["go"], stream=stream))
    for said in await hold(packages, sdk, *jobs, program="loops.mjs"):
        assert said["error"] is None and [t.strip() for t in said["turns"]] == ["done 📄"]
    for grant in grants:
        stored = world.stored(grant)
        assert [c.link for c in stored] == ["first", "continued", "continued"], [c.link_reason for c in stored]
        assert [[m["content"] for m in c.messages] for c in stored[1:]] == [["ran ls", "ran é"], ["ran cat"]]
        world.check_prompts(grant)


# What goes wrong ------------------------------------------------------------------------------------------------------

# of: an overflow, a stranger, an ended session, used up turns
REFUSALS = {
    "openaiChat": ["BadRequestError", "AuthenticationError", "APIError", "PermissionDeniedError"],
    "openaiResponses": ["BadRequestError", "AuthenticationError", "APIError", "BadRequestError"],
    "anthropic": ["BadRequestError", "AuthenticationError", "APIError", "PermissionDeniedError"],
    "google": ["ApiError"] * 4,
    **dict.fromkeys(VERCEL + OPENCODE, ["APICallError"] * 4),
}


@pytest.mark.parametrize("sdk", SDKS)
async def test_refusals_have_the_sdks_own_class_and_are_not_tried_again(world, packages, sdk):
    ended, grant = world.mint("t.ended")
    world.store.revoke(grant.attempt_id)
    fine, _ = world.mint("t.fine")
    limited = [world.mint(f"t.limited{n}", max_turns=1)[0] for n in range(2)]
    jobs = []
    for stream in (False, True):
        more = {"stream": stream, "retries": 2}
        jobs.append(job(world, fine, ["word " * 5000], **more))
        jobs.append(job(world, "nobody", ["go"], **more))
        jobs.append(job(world, ended, ["go"], **more))
        jobs.append(job(world, limited[stream], ["go", "on"], **more))
        world.says("ok")
    held = await hold(packages, sdk, *jobs)
    last = 400 if "Responses" in sdk else 403
    assert [h["statuses"] for h in held] == [[400], [401], [410], [200, last]] * 2
    errors = [h["error"] for h in held]
    assert [e["class"] for e in errors] == REFUSALS[sdk] * 2
    assert [e["status"] for e in errors] == [400, 401, 410, last] * 2
    if sdk in VERCEL + OPENCODE:
        assert not any(e["retryable"] for e in errors)
    words = ("tokens", "unknown session or API key", "this session has ended", "used all its turns")
    codes = ("context_length_exceeded", "invalid_api_key", "session_ended", "turn_limit")
    for error, word, code in zip(errors, words * 2, codes * 2, strict=True):
        told = error["message"] + json.dumps(error["body"])
        assert word in error["message"] and code in told.lower()
    assert len(world.engine.served) == 2


@pytest.mark.parametrize("sdk", SDKS)
async def test_what_may_pass_is_tried_again(world, packages, sdk):
    async def one(stream: bool) -> dict[str, Any]:
        capability, _ = world.mint(f"t.s{int(stream)}")
        async with Running(packages, sdk, job(world, capability, ["go"], stream=stream, retries=2)) as running:
            assert (await running.until("status"))["status"] == 503
            refused.append(stream)
            if len(refused) == 2:
                world.server.service.draining = False
            return await running.ended()

    refused: list[bool] = []
    world.server.service.draining = True
    world.says("The dog sleeps.")
    world.says("The dog sleeps.")
    for said in await asyncio.gather(one(False), one(True)):
        assert said["error"] is None and said["turns"][0]["text"] == "The dog sleeps."
        assert set(said["statuses"][:-1]) == {503} and said["statuses"][-1] == 200
    assert len(world.engine.served) == 2


@pytest.mark.parametrize("sdk", SDKS)
async def test_heartbeats_in_a_held_stream_mean_nothing(world, packages, sdk):
    capability, grant = world.mint()
    text = sample(CALLS[1], text="The dog sleeps 📄.")
    # Before the first token; among the thoughts; in the text; in the call.
    replies = [world.says(text, hold_after=n) for n in (0, 6, 30, 60)]
    metrics, served = world.server.service.metrics, world.engine.served
    async with Running(packages, sdk, job(world, capability, ["go", *[["ok"]] * 3], stream=True)) as running:
        ended = asyncio.create_task(running.ended())
        for n, reply in enumerate(replies):
            await world.engine.until(lambda n=n, r=reply: len(served) > n and served[n].sent == r.hold_after)
            before = metrics.heartbeats._value.get()
            while metrics.heartbeats._value.get() < before + 3:
                await world.server.service.redis_up()
            reply.release.set()
        said = await ended
    assert said["error"] is None and said["statuses"] == [200] * 4
    for turn in said["turns"]:
        assert turn["text"].rstrip("\n") == "The dog sleeps 📄." and len(turn["calls"]) == 1
        assert turn["deltas"] == {"text": turn["text"], "reasoning": turn["reasoning"]}
    assert [c.link for c in world.stored(grant)] == ["first", *["continued"] * 3]


BROKEN = {
    "openaiChat": "OpenAIError",
    "openaiResponses": "OpenAIError",
    "anthropic": "AnthropicError",
    "google": "ApiError",
    **dict.fromkeys(VERCEL, "APICallError"),
    **dict.fromkeys(OPENCODE, "TypeError"),
}


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_stream_that_breaks_off_is_no_answer(world, packages, sdk, monkeypatch):
    monkeypatch.setattr(pool, "RESUME_WINDOW", 0.3)
    first = sample(CALLS[1], text="The quick brown fox")
    length = len(world.ids(first, end=False))
    jobs, grants = [], []
    for n, at in enumerate((3, 30, length - 10, length + 10)):  # in thoughts, in text, in a call, behind it
        capability, grant = world.mint(f"t.s{n}")
        grants.append(grant)
        world.says(first + "The dog sleeps. " * 20, drop_after=at)
        world.says("", status=400)  # there is no going on at the engine either
        world.says("whole")
        jobs += [job(world, capability, ["go"], stream=True, retries=2)] * 2
    held = await hold(packages, sdk, *jobs)
    for broken, again in zip(held[::2], held[1::2], strict=True):
        assert broken["statuses"] == again["statuses"] == [200]
        assert broken["turns"] == [] and broken["error"]["class"] == BROKEN[sdk]
        if sdk in VERCEL:
            assert broken["error"]["retryable"]
        assert again["error"] is None and again["turns"][0]["text"] == "whole"
    for grant in grants:
        assert [(c.link, c.finish_reason) for c in world.stored(grant)] == [("first", "error"), ("sibling", "stop")]


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_whole_answer_that_breaks_off_is_tried_again(world, packages, sdk, monkeypatch):
    monkeypatch.setattr(pool, "RESUME_WINDOW", 0.3)
    capability, grant = world.mint()
    world.says("The quick brown fox", drop_after=3)
    world.says("", status=400)
    world.says("whole")
    (said,) = await hold(packages, sdk, job(world, capability, ["go"], retries=2))
    assert said["error"] is None and said["statuses"] == [503, 200] and said["turns"][0]["text"] == "whole"
    assert [(c.link, c.finish_reason) for c in world.stored(grant)] == [("first", "error"), ("sibling", "stop")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sdk", ["vercelResponses", "opencodeResponses"])
async def test_references_to_earlier_items_are_served(roomy, packages, sdk, stream):
    """What Vercel's SDK sends of earlier answers if it isn't told `store: false`; and of reasoning it reads summaries."""
    world = roomy
    capability, grant = world.mint()
    world.says(sample(*CALLS, text="Grüße."))
    world.says(sample(text="One file."))
    world.says("Bye.")
    steps = ["List the files.", ["a.txt 📄", "", "no such file"], "Tell more."]
    asked = job(world, capability, steps, stream=stream, store=True, summary="auto")
    (said,) = await hold(packages, sdk, asked)
    assert said["error"] is None and said["statuses"] == [200] * 3
    assert [t["reasoning"] for t in said["turns"]] == ["I  thïnk 🤔.", "I  thïnk 🤔.", ""]
    assert [(c["name"], c["arguments"]) for c in said["turns"][0]["calls"]] == CALLS
    assert [c.link for c in world.stored(grant)] == ["first", "continued", "continued"]
    world.check_prompts(grant)
