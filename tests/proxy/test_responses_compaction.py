"""Compaction over Responses, through the official client."""

from __future__ import annotations

import aiohttp

from tests.proxy.responses_client import RUN, RUN_LS, client, dicts, resolved, result, streamed, user, whole


async def test_compaction_gives_the_users_messages_and_a_summary_to_go_on_from(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says(RUN_LS)
    first = await api.responses.create(model="m", input=[user("go")], tools=[RUN], instructions="Be careful.")
    items = [user("go"), *dicts(first), result(first.output[0]), user([{"type": "input_text", "text": "more"}])]
    world.says("<think>Short.</think>Listed the files.")
    compact = await api.responses.compact(
        model="m", input=items, instructions="Be careful.", extra_body={"tools": [RUN], "stream": True}
    )
    assert compact.object == "response.compaction" and compact.usage.output_tokens > 0
    assert [i.type for i in compact.output] == ["message", "message", "compaction"]
    assert compact.output[1].content[0].text == "more"
    made = world.stored(grant)[1]
    assert (made.role, made.link) == ("compaction", "continued") and made.messages[-1]["role"] == "user"
    world.says("Going on.")
    after = [*[i.to_dict(warnings=False) for i in compact.output], user("next")]
    await api.responses.create(model="m", input=after, tools=[RUN], instructions="Be careful.")
    last = world.stored(grant)[2]
    said = [m["content"] for m in resolved(last, world, grant)]
    assert said[:3] == ["Be careful.", "go", "more"] and said[3].endswith("Listed the files.") and said[4] == "next"
    world.check_prompts(grant)


async def test_a_client_that_waits_for_a_compaction_hears_heartbeats(world):
    """Nothing of a summary in the making is told, however fast it is sampled."""
    capability, _ = world.mint()  # the world's heartbeat is 0.2 s
    world.says("word " * 40, delay=0.05)
    sent = {"model": "m", "input": [user("go"), {"type": "compaction_trigger"}], "stream": True}
    url = f"{world.server.url}/s/{capability}/v1/responses"
    async with aiohttp.ClientSession() as http, http.post(url, json=sent) as response:
        told = await response.read()
    assert told.count(b"event: response.in_progress") >= 3 and b"response.completed" in told


async def test_a_compaction_can_be_asked_for_inside_a_response(world):
    capability, grant = world.mint()
    api = client(world, capability)
    for ask in (whole, streamed):
        world.says("Listed the files.")
        _, answer = await ask(api, model="m", input=[user("go"), {"type": "compaction_trigger"}])
        (item,) = answer.output
        assert item.type == "compaction"
    assert world.stored(grant)[0].role == "compaction"
    world.says("ok")
    await api.responses.create(model="m", input=[item.to_dict(), user("next")])
    assert world.stored(grant)[-1].messages[0]["content"].endswith("Listed the files.")
