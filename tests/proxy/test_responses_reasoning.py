"""Reasoning over Responses, through the official client: as text, as a summary, sealed."""

from __future__ import annotations

from itertools import product
from typing import Any

import openai
import pytest

from tests.proxy.responses_client import RUN, RUN_LS, client, dicts, links, result, streamed_raw, user


async def test_reasoning_comes_back_through_what_only_we_can_read(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("<think>\nI think, therefore.\n</think>Yes.")
    include = ["reasoning.encrypted_content"]
    first = await api.responses.create(model="m", input=[user("go")], include=include)
    reasoning, message = dicts(first)
    assert "therefore" not in reasoning["encrypted_content"]
    del reasoning["content"]
    world.says("done")
    await api.responses.create(model="m", input=[user("go"), reasoning, message, user("and?")], include=include)
    for spoiled in ("gAAAAAforeign", "polar1.garbage", "polar1.", reasoning["encrypted_content"][:-3]):
        world.says("done")
        broken = reasoning | {"encrypted_content": spoiled, "summary": [{"type": "summary_text", "text": "I think,"}]}
        await api.responses.create(model="m", input=[user("go"), broken, message, user(spoiled)])
    assert links(world, grant) == ["first"] + ["continued"] * 5
    turn = world.stored(grant)[1]
    assert turn.message_shared == 2


async def test_a_summary_is_given_to_who_asks_for_one(world):
    """As the API tells of it: parts of the item's summary, which come back as the reasoning that they are."""
    capability, grant = world.mint()
    api = client(world, capability)
    include = ["reasoning.encrypted_content"]
    items: list[Any] = [user("go")]
    for n, (asked, sealed) in enumerate(
        product(({"summary": "auto"}, {"generate_summary": "detailed"}), (True, False))
    ):
        world.says(f"<think>\nI  thïnk {n}.\n</think>Yes. {RUN_LS}")
        ask = dict(model="m", input=items, tools=[RUN], reasoning=asked, include=include if sealed else [])
        events, answer = await streamed_raw(api, **ask)
        told = [e for e in events if "reasoning" in e.type]
        kinds = [e.type.removeprefix("response.reasoning_summary_") for e in told]
        assert kinds[0] == "part.added" and kinds[-2:] == ["text.done", "part.done"]
        assert set(kinds[1:-2]) == {"text.delta"} and {e.summary_index for e in told} == {0}
        reasoning = answer.output[0]
        assert "".join(e.delta for e in told[1:-2]) == told[-2].text == told[-1].part.text == f"I  thïnk {n}."
        assert {e.item_id for e in told} == {reasoning.id} and {e.output_index for e in told} == {0}
        assert [(s.type, s.text) for s in reasoning.summary] == [("summary_text", f"I  thïnk {n}.")]
        assert not reasoning.content and bool(reasoning.encrypted_content) == sealed
        assert world.stored(grant)[-1].requested_sampling["reasoning_summary"] in asked.values()
        # The whole answer to the same conversation says the same.
        other, _ = world.mint(f"t.s{n + 1}")
        world.says(f"<think>\nI  thïnk {n}.\n</think>Yes. {RUN_LS}")
        same = await client(world, other).responses.create(**(ask | {"input": [user("go")]}))
        assert [plain(i) for i in same.output] == [plain(i) for i in answer.output]
        echoed = dicts(answer)
        if sealed:
            echoed[0]["summary"] = []
        items += [*echoed, result(answer.output[-1])]
    assert links(world, grant) == ["first"] + ["continued"] * 3
    world.check_prompts(grant)


def plain(item: Any) -> dict:
    return {k: v for k, v in item.to_dict().items() if k not in ("id", "call_id", "encrypted_content")}


async def test_without_being_asked_for_there_is_no_summary(world):
    capability, _ = world.mint()
    api = client(world, capability)
    for asked in ({}, {"summary": None}, {"summary": "none"}, {"effort": "low"}):
        world.says("<think>Hm.</think>Yes.")
        events, answer = await streamed_raw(api, model="m", input=f"go {asked}", reasoning=asked)
        assert answer.output[0].summary == [] and answer.output[0].content[0].text == "Hm."
        assert not any("summary" in e.type for e in events)
    for name in ("summary", "generate_summary"):
        with pytest.raises(openai.BadRequestError) as e:
            await api.responses.create(model="m", input="go", reasoning={name: "long"})
        assert e.value.param == f"reasoning.{name}"
