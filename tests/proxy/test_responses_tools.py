"""Tools and calls over Responses, through the official client: every kind of them stays one chain."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.proxy.responses_client import (
    AGENTS,
    PATCH,
    RUN,
    RUN_LS,
    call,
    client,
    dicts,
    links,
    output,
    result,
    streamed,
    streamed_raw,
    user,
    whole,
)


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
