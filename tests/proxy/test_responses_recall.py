"""Requests that name what was said earlier instead of sending it, through the official client: item_reference items and
previous_response_id."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.proxy.responses_client import (
    PATCH,
    RUN,
    RUN_LS,
    call,
    client,
    dicts,
    links,
    output,
    resolved,
    result,
    streamed_raw,
    user,
    whole,
)

TOOLS = [RUN, PATCH, {"type": "local_shell"}]
SAYS = [
    f"<think>Hm.</think>Look. {RUN_LS}\n{call('apply_patch', input='né')}",
    call("apply_patch", patch="fits no form"),
    call("local_shell", command=["ls"]),
    f"First. {RUN_LS} Between. {call('run', command='pwd')} After.",
    "<think>Done?</think>Done.",
    "Bye.",
]


def references(response: Any) -> list[dict]:
    return [{"type": "item_reference", "id": i.id} for i in response.output]


async def test_referenced_items_are_what_they_were(world):
    """Every kind of item, all of an answer's or some: the session is the one that inline items give."""
    capability, grant = world.mint()
    api = client(world, capability)
    items: list[Any] = [user("go")]
    inline: list[Any] = [user("go")]
    for i, said in enumerate(SAYS):
        world.says(said)
        _, answer = await (streamed_raw if i % 2 else whole)(api, model="m", input=items, tools=TOOLS)
        results = [output(o) for o in answer.output if o.type.endswith("_call")] or [user("on")]
        items = [*items, *references(answer), *results]
        inline = [*inline, *dicts(answer), *results]
    assert links(world, grant) == ["first"] + ["continued"] * (len(SAYS) - 1)
    world.check_prompts(grant)
    for body in (items, inline):
        world.says("The end.")
        await api.responses.create(model="m", input=body, tools=TOOLS)
    one, two = world.stored(grant)[-2:]
    assert one.link == two.link == "continued" and one.prompt_tail.tolist() == two.prompt_tail.tolist()
    said = [{k: v for k, v in m.items() if k != "refs"} for m in resolved(one, world, grant)]
    assert said == [{k: v for k, v in m.items() if k != "refs"} for m in resolved(two, world, grant)]
    counts = [await api.responses.input_tokens.count(model="m", input=body, tools=TOOLS) for body in (items, inline)]
    assert counts[0].input_tokens == counts[1].input_tokens > 0


async def test_what_is_left_out_of_the_references_is_left_out(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says(f"<think>Hm.</think>Look. {RUN_LS}\n{call('run', command='pwd')}")
    first = await api.responses.create(model="m", input=[user("go")], tools=TOOLS)
    _, message, _, second = first.output
    kept = [{"id": message.id}, {"type": "item_reference", "id": second.id}, result(second)]  # one without its type
    world.says("ok")
    await api.responses.create(model="m", input=[user("go"), *kept], tools=TOOLS)
    turn = resolved(world.stored(grant)[1], world, grant)[1]
    assert turn["content"].strip() == "Look." and "reasoning_content" not in turn
    assert [c["function"]["arguments"] for c in turn["tool_calls"]] == ['{"command": "pwd"}']
    assert links(world, grant)[1] == "rewritten"


async def test_a_compaction_may_be_referenced(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("Listed the files.")
    made = await api.responses.create(model="m", input=[user("go"), {"type": "compaction_trigger"}])
    world.says("ok")
    await api.responses.create(model="m", input=[*references(made), user("next")])
    summary = world.stored(grant)[1].messages[0]
    assert summary["role"] == "user" and summary["content"].endswith("\n\nListed the files.")
    with pytest.raises(openai.BadRequestError) as e:
        await api.responses.create(model="m", input="next", previous_response_id=made.id)
    assert e.value.code == "previous_response_not_found"
    world.says("Short.")
    compact = await api.responses.compact(model="m", input=[user("go")], extra_body={"tools": []})
    with pytest.raises(openai.BadRequestError) as e:
        await api.responses.create(model="m", input=references(compact))
    assert e.value.code == "item_not_found"


@pytest.mark.parametrize("forget", [False, True])
async def test_a_conversation_goes_on_from_a_response(world, forget):
    capability, grant = world.mint()
    api = client(world, capability)
    ask = dict(model="m", tools=TOOLS, instructions="Be careful.")
    world.says(f"<think>Hm.</think>Look. {RUN_LS}")
    first = await api.responses.create(**ask, input="go")
    assert first.previous_response_id is None
    world.says(call("apply_patch", patch="fits no form"))
    second = await api.responses.create(**ask, input=[result(first.output[-1])], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    world.says("Done.")
    if forget:
        await world.servers.pop().stop()
        await world.serve(heartbeat=0.2)
        api = client(world, capability)
    more = [result(second.output[0], "no")]
    _, third = await streamed_raw(api, **ask, input=more, previous_response_id=second.id)
    assert third.output_text == "Done." and third.previous_response_id == second.id
    assert links(world, grant) == ["first", "continued", "continued"]
    world.check_prompts(grant)
    # Another answer may be gone on from, and with other instructions: those of the first request were for it alone.
    world.says("Else.")
    await api.responses.create(
        model="m", tools=TOOLS, instructions="Be bold.", input=[result(first.output[-1])], previous_response_id=first.id
    )
    said = resolved(world.stored(grant)[3], world, grant)
    assert [m["role"] for m in said] == ["system", "user", "assistant", "tool"] and said[0]["content"] == "Be bold."
    inline = [user("go"), *dicts(first), result(first.output[-1]), *dicts(second), *more]
    counts = [
        await api.responses.input_tokens.count(**ask, **change)
        for change in ({"input": more, "previous_response_id": second.id}, {"input": inline})
    ]
    assert counts[0].input_tokens == counts[1].input_tokens > 0


async def test_the_same_request_again_is_the_same_call(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("One.")
    first = await api.responses.create(model="m", input="go")
    for n in range(2):
        world.says("Two.")
        await api.responses.create(model="m", input="on", previous_response_id=first.id)
        assert links(world, grant)[-1] == ("continued", "sibling")[n]
    world.says("Three.")
    await api.responses.create(model="m", input="on", previous_response_id=first.id, instructions="Be bold.")
    assert links(world, grant)[-1] == "rewritten"


async def test_a_compaction_can_follow_a_response(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("One.")
    first = await api.responses.create(model="m", input="go")
    world.says("Said one.")
    compact = await api.responses.compact(model="m", input=[user("more")], previous_response_id=first.id)
    assert [i.type for i in compact.output] == ["message", "message", "compaction"]
    assert [i.content[0].text for i in compact.output[:2]] == ["go", "more"]
    assert links(world, grant) == ["first", "continued"]


async def test_an_item_is_referenced_once(world):
    """A short request must not become a long one."""
    capability, grant = world.mint()
    api = client(world, capability)
    world.says(f"Look. {RUN_LS}")
    first = await api.responses.create(model="m", input="go", tools=TOOLS)
    world.says("Short.")
    made = await api.responses.create(model="m", input=[user("go"), {"type": "compaction_trigger"}])
    message, called = references(first)
    (compaction,) = references(made)
    other = {"type": "item_reference", "id": compaction["id"].removesuffix("_0") + "_00"}
    for twice in ([called, called], [compaction, compaction], [compaction, other]):
        with pytest.raises(openai.BadRequestError) as e:
            await api.responses.create(model="m", input=twice)
        assert e.value.code == "duplicate_item" and e.value.param == "input[1].id"
    world.says("ok")
    await api.responses.create(model="m", input=[user("go"), message, message, user("on")])
    assert resolved(world.stored(grant)[-1], world, grant)[1]["content"].strip() == "Look."


async def test_another_sessions_words_are_unknown(world):
    capability, _ = world.mint("t.s0")
    world.says(f"Mine. {RUN_LS}")
    secret = await client(world, capability).responses.create(model="m", input="go", tools=TOOLS)
    thief, grant = world.mint("t.s1")
    api = client(world, thief)
    for change, code in (
        ({"input": references(secret)[:1]}, "item_not_found"),
        ({"input": references(secret)[1:]}, "item_not_found"),
        ({"input": "on", "previous_response_id": secret.id}, "previous_response_not_found"),
    ):
        with pytest.raises(openai.BadRequestError) as e:
            await api.responses.create(model="m", **change)
        assert e.value.code == code and "Mine" not in e.value.message
    assert world.stored(grant) == []


async def test_an_ended_session_recalls_nothing(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("One.")
    first = await api.responses.create(model="m", input="go")
    world.store.revoke(grant.attempt_id)
    for change in ({"input": references(first)}, {"input": "on", "previous_response_id": first.id}):
        with pytest.raises(openai.APIStatusError) as e:
            await api.responses.create(model="m", **change)
        assert e.value.status_code == 410 and e.value.code == "session_ended"


async def test_what_broke_off_can_be_gone_on_from(world):
    """A client that cut a stream short knows the response's id, and of its items what it saw begin."""
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("The quick brown fox jumps", hold_after=3)
    stream = await api.responses.create(model="m", input="go", stream=True)
    async for e in stream:
        if e.type == "response.created":
            ident = e.response.id
        if e.type == "response.output_text.delta":
            break
    await stream.close()
    (cut,) = await world.until_stored(grant, 1)
    world.says("ok")
    await api.responses.create(model="m", input="on", previous_response_id=ident)
    assert world.stored(grant)[1].parent_id == cut.completion_id
    said = resolved(world.stored(grant)[1], world, grant)
    assert said[1]["content"] == cut.response["content"] != ""
