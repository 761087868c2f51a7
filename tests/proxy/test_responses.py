"""The Responses dialect through the official client: whole and streamed answers, tools, reasoning, continuity, errors."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import aiohttp
import httpx
import openai
import pydantic
import pytest

RUN = {
    "type": "function",
    "name": "run",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}


def call(name: str, **arguments: Any) -> str:
    inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"


RUN_LS = call("run", command="ls")


def client(world, capability: str, **options) -> Any:
    return openai.AsyncOpenAI(base_url=f"{world.server.url}/s/{capability}/v1", api_key="x", max_retries=0, **options)


def user(text: Any) -> dict:
    return {"role": "user", "content": text}


def result(item: Any, text: Any = "ok") -> dict:
    kind = {"custom_tool_call": "custom_tool_call_output"}.get(item.type, "function_call_output")
    return {"type": kind, "call_id": item.call_id, "output": text}


def links(world, grant) -> list[str]:
    return [c.link for c in sorted(world.stored(grant), key=lambda c: c.index)]


async def streamed(api, **request) -> tuple[list, Any]:
    """(events, final response) as the official client puts them together."""
    async with api.responses.stream(**request) as stream:
        events = [e async for e in stream]
        return events, await stream.get_final_response()


async def test_a_whole_answer_is_captured_completely(world):
    capability, grant = world.mint()
    world.says("The dog sleeps.")
    answer = await client(world, capability).responses.create(
        model="anything",
        instructions="Be careful.",
        input="What does the dog do?",
        temperature=0.2,
        max_output_tokens=50,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        metadata={"a": "b"},
    )
    assert answer.output_text == "The dog sleeps." and answer.status == "completed" and answer.model == "anything"
    (c,) = world.stored(grant)
    assert answer.usage.input_tokens == c.prompt_length and answer.usage.output_tokens == len(c.sampled_ids)
    assert answer.usage.total_tokens == c.prompt_length + len(c.sampled_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be careful.", {"a": "b"}, 0.2)
    assert c.messages == [
        {"role": "system", "content": "Be careful."},
        {"role": "user", "content": "What does the dog do?"},
    ]
    assert c.dialect == "openai_responses" and c.sampling["temperature"] == 1.0 and c.sampling["max_new_tokens"] == 50
    assert c.requested_sampling == {
        "temperature": 0.2,
        "max_tokens": 50,
        "reasoning_effort": "low",
        "reasoning_summary": "auto",
        "verbosity": "low",
    }


async def test_a_stream_tells_of_everything_in_order(world):
    capability, grant = world.mint()
    world.says(f"<think>\nLook first.\n</think>I look. {RUN_LS}\n{call('run', command='né')}")
    events, final = await streamed(client(world, capability), model="m", input="go", tools=[RUN])
    kinds = [e.type.removeprefix("response.") for e in events]
    once = [k for i, k in enumerate(kinds) if k != "in_progress" and (i == 0 or kinds[i - 1] != k)]
    one_call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert once == [
        "created",
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
        ),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *(one_call * 2),
        "output_item.done",
        "completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    reasoning, message, one, two = final.output
    assert reasoning.content[0].text == "Look first." and message.content[0].text.strip() == "I look."
    assert [json.loads(c.arguments) for c in (one, two)] == [{"command": "ls"}, {"command": "né"}]
    (c,) = world.stored(grant)
    assert all(c.completion_id[2:] in i.id for i in final.output)
    assert final.usage.output_tokens == len(c.sampled_ids) and c.finish_reason == "tool_calls"
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [i.to_dict() for i in done] == [without_parsed(i.to_dict()) for i in final.output]


def without_parsed(value: Any) -> Any:
    """An output item without what the official client adds to it."""
    if isinstance(value, list):
        return [without_parsed(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: without_parsed(v) for k, v in value.items() if k not in ("parsed", "parsed_arguments")}


@pytest.mark.parametrize("ends", ["by itself", "broken off"])
async def test_nothing_is_run_before_the_answer_is_certain(world, ends):
    capability, grant = world.mint()
    text = f"Hm. {RUN_LS} more and more and more"
    reply = world.says(text, hold_after=len(world.ids(text)) - 3)
    kinds: list[str] = []
    broken = False
    try:
        async for e in await client(world, capability).responses.create(
            model="m", input="go", tools=[RUN], stream=True
        ):
            kinds.append(e.type)
            if e.type == "response.function_call_arguments.done":
                # The call is known and told; the answer goes on.
                assert "response.output_item.done" not in kinds
                reply.release.set() if ends == "by itself" else world.store.revoke(grant.attempt_id)
    except (openai.APIError, httpx.HTTPError):
        broken = True
    assert broken == (ends == "broken off")
    assert ("response.completed" in kinds) != broken and "response.failed" not in kinds
    assert kinds.count("response.output_item.done") == (0 if broken else 2)


async def test_a_silent_engine_is_bridged_by_events(world):
    capability, _ = world.mint()
    reply = world.says("Hello.", hold_after=0)
    stream = await client(world, capability).responses.create(model="m", input="go", stream=True)
    beats = 0
    async for e in stream:
        beats += e.type == "response.in_progress"
        if beats == 3:
            reply.release.set()
        last = e
    assert beats >= 3 and last.type == "response.completed" and last.response.output_text == "Hello."


async def test_a_cut_off_answer_is_incomplete_and_goes_on(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("The quick brown fox jumps", end=False)
    events, final = await streamed_raw(api, model="m", input=[user("go")], max_output_tokens=4)
    assert events[-1].type == "response.incomplete" and final.incomplete_details.reason == "max_output_tokens"
    assert final.output[-1].status == "incomplete" and final.status == "incomplete"
    world.says("done")
    await api.responses.create(model="m", input=[user("go"), *dicts(final), user("on")])
    assert links(world, grant) == ["first", "continued"]
    world.check_prompts(grant)


async def streamed_raw(api, **request) -> tuple[list, Any]:
    events = [e async for e in await api.responses.create(**request, stream=True)]
    return events, events[-1].response


def dicts(response: Any) -> list[dict]:
    """Output items as they go back into the next input."""
    return [i.to_dict() for i in response.output]


async def test_a_conversation_with_every_kind_of_call_stays_one_chain(world):
    capability, grant = world.mint()
    api = client(world, capability)
    tools = [
        RUN,
        PATCH,
        AGENTS,
        {"type": "local_shell"},
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
        {"type": "tool_search", "execution": "client"},
        {"type": "web_search", "external_web_access": False},
    ]
    items: list[Any] = [{"role": "developer", "content": "Be careful."}, user("go")]
    says = [
        f"<think>Hm.</think>Look. {RUN_LS}\n{call('agents__spawn')}",
        call("apply_patch", input="*** Begin Patch\n+né “x”\n*** End Patch\n"),
        call("local_shell", command=["ls", "-l"], timeout_ms=5),
        call("shell", commands=["ls", "pwd"]),
        call("apply_patch_2", type="delete_file", path="a"),
        call("tool_search", query="git"),
        # Calls that no form fits.
        call("apply_patch", patch="x"),
        call("shell", commands="ls"),
        call("nothing_known", a=1.0),
        "Done.",
    ]
    kinds = []
    for i, text in enumerate(says):
        world.says(text)
        ask = dict(model="m", input=items, tools=tools, store=False, include=["reasoning.encrypted_content"])
        _, answer = await (streamed if i % 2 else whole)(api, **ask)
        items += dicts(answer)
        for item in answer.output:
            if item.type.endswith("_call"):
                kinds.append((item.type, getattr(item, "name", None), getattr(item, "namespace", None)))
                items.append(output(item))
    items.append(user("thanks"))
    world.says("Bye.")
    await api.responses.create(model="m", input=items, tools=tools)
    assert kinds == [
        ("function_call", "run", None),
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "apply_patch", None),
        ("local_shell_call", None, None),
        ("shell_call", None, None),
        ("apply_patch_call", None, None),
        ("tool_search_call", None, None),
        ("custom_tool_call", "apply_patch", None),
        ("function_call", "shell", None),
        ("function_call", "nothing_known", None),
    ]
    assert links(world, grant) == ["first"] + ["continued"] * len(says)
    world.check_prompts(grant)
    assert world.stored(grant)[0].labels["dropped_tools"] == "web_search"


async def whole(api, **request) -> tuple[list, Any]:
    return [], await api.responses.create(**request)


def output(item: Any) -> dict:
    found = {"type": "function", "name": "commit", "description": "Commit.", "defer_loading": True}
    return {
        "function_call": lambda: result(item, [{"type": "input_text", "text": "né"}]),
        "custom_tool_call": lambda: result(item),
        "local_shell_call": lambda: {"type": "local_shell_call_output", "id": item.call_id, "output": "a b"},
        "shell_call": lambda: {
            "type": "shell_call_output",
            "call_id": item.call_id,
            "output": [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        "apply_patch_call": lambda: {
            "type": "apply_patch_call_output",
            "call_id": item.call_id,
            "status": "completed",
        },
        "tool_search_call": lambda: {
            "type": "tool_search_output",
            "call_id": item.call_id,
            "execution": "client",
            "status": "completed",
            "tools": [{"type": "namespace", "name": "mcp__git__", "description": "Git.", "tools": [found]}],
        },
    }[item.type]()


async def test_a_tool_that_was_found_is_called_in_its_namespace(world):
    capability, grant = world.mint()
    api = client(world, capability)
    tools = [{"type": "tool_search", "execution": "client", "description": "Find tools."}]
    world.says(call("tool_search", query="git"))
    first = await api.responses.create(model="m", input=[user("go")], tools=tools)
    items = [user("go"), *dicts(first), output(first.output[0])]
    world.says(call("mcp__git__commit", message="x"))
    second = await api.responses.create(model="m", input=items, tools=tools)
    (made,) = second.output
    assert (made.name, made.namespace) == ("commit", "mcp__git__")
    told = json.loads(world.stored(grant)[1].messages[-1]["content"])
    assert told["name"] == "mcp__git__commit" and told["description"] == "(mcp__git__: Git.)\nCommit."
    world.says("done")
    await api.responses.create(model="m", input=[*items, *dicts(second), result(made)], tools=tools)
    assert links(world, grant) == ["first", "continued", "continued"]


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


async def test_parallel_calls_and_their_results_in_any_order_are_one_turn(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says(f"<think>Hm.</think>Both. {RUN_LS}\n{RUN_LS}")
    first = await api.responses.create(model="m", input=[user("go")], tools=[RUN])
    reasoning, message, one, two = first.output
    rest = [i.to_dict() for i in (reasoning, message)]
    for order in ((one, two, "one", "two"), (one, "one", two, "two")):
        tail = [i.to_dict() if not isinstance(i, str) else result({"one": one, "two": two}[i], i) for i in order]
        world.says("done")
        await api.responses.create(model="m", input=[user("go"), *rest, *tail], tools=[RUN])
        last = world.stored(grant)[-1]
        assert last.link == "continued" and [m["content"] for m in last.messages] == ["one", "two"]
    world.check_prompts(grant)


async def test_a_text_format_becomes_a_schema():
    from proxy.dialects.base import Call
    from proxy.dialects.responses import OpenAIResponses

    def schema(form: Any, *items: Any) -> Any:
        body = {"input": [user("go"), *items], "text": {"format": form}}
        return OpenAIResponses().parse(body, Call()).schema

    shape = {"type": "object", "properties": {}}
    assert schema({"type": "json_schema", "name": "x", "schema": shape, "strict": True}) == shape
    assert schema({"type": "json_object"}) == {} and schema({"type": "text"}) is None
    update = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    assert schema({"type": "text"}, update) == {}


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


def resolved(completion, world, grant) -> list[dict]:
    """All messages of a completion."""
    if not completion.message_shared:
        return completion.messages
    parent = next(c for c in world.stored(grant) if c.completion_id == completion.parent_id)
    return [*resolved(parent, world, grant), parent.response][: completion.message_shared] + completion.messages


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


async def test_tokens_are_counted_without_an_answer(world):
    capability, grant = world.mint()
    api = client(world, capability)
    counted = await api.responses.input_tokens.count(model="m", input=[user("go")], tools=[RUN])
    world.says("ok")
    answer = await api.responses.create(model="m", input=[user("go")], tools=[RUN])
    assert counted.object == "response.input_tokens" and counted.input_tokens == answer.usage.input_tokens
    assert len(world.stored(grant)) == 1


async def test_nothing_is_stored_to_be_fetched(world):
    capability, _ = world.mint()
    api = client(world, capability)
    for ask in (
        api.responses.retrieve("resp_1"),
        api.responses.delete("resp_1"),
        api.responses.cancel("resp_1"),
        api.responses.input_items.list("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError) as e:
            await ask
        assert "not stored" in e.value.message


async def test_a_websocket_is_sent_to_http(world):
    capability, _ = world.mint()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as e:
            await http.ws_connect(f"{world.server.url}/s/{capability}/v1/responses")
        assert e.value.status == 426


async def test_an_ended_session_and_a_limit_are_told_as_codex_needs_them(world):
    capability, grant = world.mint(max_turns=1)
    api = client(world, capability)
    world.says("ok")
    await api.responses.create(model="m", input="go")
    with pytest.raises(openai.BadRequestError) as e:
        await api.responses.create(model="m", input="on")
    assert e.value.code and len(world.stored(grant)) == 1
    world.server.service.draining = True
    other, _ = world.mint("t.s1")
    with pytest.raises(openai.InternalServerError) as e:
        await client(world, other).responses.create(model="m", input="go")
    assert e.value.status_code == 503 and int(e.value.response.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    "change, field, code",
    [
        ({"input": []}, "input", "invalid_request"),
        ({"input": 3}, "input", "invalid_request"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_item"),
        ({"input": [{"id": "x"}]}, "input[0]", "unsupported_item"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "unsupported_item"),
        ({"input": [{"type": "spell"}]}, "input[0].type", "invalid_request"),
        ({"input": [{"role": "wizard", "content": ""}]}, "input[0].role", "invalid_request"),
        ({"input": [user([{"type": "input_audio"}])]}, "input[0].content[0]", "unsupported_content"),
        ({"input": [user([{"type": "input_file", "file_id": "f"}])]}, "input[0].content[0]", "unsupported_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content", "invalid_item"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name", "invalid_request"),
        ({"input": [{"type": "function_call_output", "call_id": 3}]}, "input[0].call_id", "invalid_request"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
        ({"temperature": "hot"}, "temperature", "invalid_request"),
        ({"tools": [{"type": "wand"}]}, "tools[0].type", "invalid_request"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_request"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"tool_choice": {"type": "function", "name": "fly"}}, "tool_choice.name", "invalid_request"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "invalid_request",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_request"),
        ({"input": "word " * 5000}, "input", "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_served_is_refused_naming_the_field(world, change, field, code):
    capability, grant = world.mint()
    with pytest.raises(openai.BadRequestError) as e:
        await client(world, capability).responses.create(**{"model": "m", "input": "go", **change})
    assert (e.value.param, e.value.code) == (field, code), e.value.message
    assert world.stored(grant) == [] and world.engine.served == []


async def test_a_long_random_session_is_one_chain_and_exactly_what_was_sampled(world):
    capability, grant = world.mint()
    api, random = client(world, capability), Random(7)
    alphabet = 'ab "\\\n{}<>/é“”日本🙂\u200d👩\u0301'
    items: list[Any] = [user("go")]
    says: list[str] = []

    def words(longest: int = 24) -> str:
        return "".join(random.choice(alphabet) for _ in range(random.randint(1, longest)))

    for turn in range(16):
        says.append(f"<think>{words()}</think>" if random.random() < 0.5 else "")
        says[-1] += f"word {words()}" if random.random() < 0.6 else ""
        for _ in range(random.choice((0, 1, 1, 3))):
            made = [
                call("run", command=words(120), n=1.0, deep={"é": [None, True, words()]}),
                call("apply_patch", input=words(120)),
                call("apply_patch", inputs=words()),
                call("agents__spawn"),
            ]
            says[-1] += "\n" + random.choice(made)
        world.says(says[-1])
        ask = dict(model="m", input=items, tools=[RUN, PATCH, AGENTS], include=["reasoning.encrypted_content"])
        events, answer = await (streamed_raw if turn % 2 else whole)(api, **ask)
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert not events or text == answer.output_text
        echoed = dicts(answer)
        for item in echoed:
            if item["type"] == "reasoning" and random.random() < 0.5:
                del item["content"]
        items += echoed
        items += [result(i, words()) for i in answer.output if "call_id" in i.to_dict()] or [user(words())]
    assert links(world, grant) == ["first"] + ["continued"] * (len(says) - 1)
    assert [c.sampled_ids.tolist() for c in world.stored(grant)] == [world.ids(s) for s in says]
    world.check_prompts(grant)


async def test_a_shape_that_the_client_asks_for_is_kept_to(world):
    class Found(pydantic.BaseModel):
        inside: str

    capability, grant = world.mint()
    api = client(world, capability)
    world.says('{"inside": "a dog"}')
    answer = await api.responses.parse(model="m", input="go", text_format=Found)
    assert answer.output_parsed == Found(inside="a dog")
    (sent,) = world.engine.served
    assert json.loads(sent.body["sampling_params"]["json_schema"])["required"] == ["inside"]
    assert "constrained" in world.stored(grant)[0].untrainable
