"""Laws of the Responses dialect: stream and whole agree, what was answered comes back as what was sampled, nothing crashes."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from proxy import history
from proxy.dialects.base import Answer, Call
from proxy.dialects.responses import OpenAIResponses
from proxy.dialects.responses_ids import completion_of, seal, unseal
from proxy.failures import CallError
from proxy.neutral import Event, Finish, Reasoning, Request, Text, ToolCall, Usage, fold

DIALECT = OpenAIResponses()
HEX = "0123456789abcdef01234567"
ID = f"c-{HEX}"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

SPAWN = {"type": "function", "name": "spawn", "description": "d", "parameters": {"type": "object"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "run", "strict": True, "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "run"},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
    {
        "type": "namespace",
        "name": "agents",
        "description": "Agents.",
        "tools": [SPAWN, {"type": "custom", "name": "run"}],
    },
    {"type": "function", "name": "agents__spawn"},
    {"type": "namespace", "name": "mcp__git__", "description": "", "tools": [SPAWN]},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    {"type": "mcp", "server_label": "x"},
    {"type": "web_search"},
]
NAMES = [
    *("run", "run_2", "apply_patch", "apply_patch_2", "agents__spawn", "agents__spawn_2", "agents__run"),
    *("mcp__git__spawn", "local_shell", "shell", "tool_search", "fly", "run_3", "web_search"),
]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | words
trees = st.recursive(scalars, lambda t: st.lists(t, max_size=3) | st.dictionaries(words, t, max_size=3), max_leaves=8)
shaped = st.one_of(
    st.fixed_dictionaries({"input": words}),
    st.fixed_dictionaries({"input": words | trees}, optional={"more": trees}),
    st.fixed_dictionaries({"command": st.lists(words)}, optional={"timeout_ms": scalars, "env": trees, "type": words}),
    st.fixed_dictionaries(
        {"commands": st.lists(words)}, optional={"timeout_ms": scalars, "max_output_length": scalars}
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(("create_file", "delete_file", "update_file", "x")), "path": words},
        optional={"diff": words | st.none()},
    ),
    st.dictionaries(words, trees, max_size=3),
)
surrogates = st.just('{"input": "\\ud800"}') | st.just('{"command": ["\\udfff"]}')
arguments = shaped.map(lambda a: json.dumps(a, ensure_ascii=False)) | surrogates


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Events in any order, as no parser may give them."""
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
    kinds = draw(st.lists(st.sampled_from("rrttc"), max_size=9))
    if draw(st.booleans()):
        kinds.sort(key="rtc".index)
    events: list[Event] = []
    for k in kinds:
        if k == "c":
            n = sum(isinstance(e, ToolCall) for e in events)
            name = draw(st.sampled_from(NAMES) | words.filter(bool))
            events.append(ToolCall(f"call_{HEX}_{n}", name, draw(arguments)))
        else:
            events.append((Reasoning if k == "r" else Text)(draw(texts)))
    usage = Usage(prompt_tokens=draw(st.integers(1, 99)), sampled_tokens=draw(st.integers(1, 99)), cached_tokens=1)
    reason = draw(st.sampled_from(("stop", "length", "tool_calls")))
    return [*events, Finish(reason=reason, usage=usage)]


def request(**body: Any) -> Request:
    return DIALECT.parse({"model": "m", "tools": TOOLS, "input": "go", **body}, Call())


def answer(asked: Request) -> Answer:
    return Answer(id=ID, model="m", created=7, request=asked)


def told(stream: bytes) -> list[dict[str, Any]]:
    out = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n", 1)
        out.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


@given(answers(), st.booleans(), st.data())
@settings(max_examples=200)
def test_a_stream_adds_up_to_the_whole_answer(events, sealed, data):
    asked = request(include=["reasoning.encrypted_content"] if sealed else [])
    encoder = DIALECT.encoder(answer(asked))
    stream = encoder.start()
    for e in events:
        if data.draw(st.booleans()):
            stream += encoder.heartbeat()
        stream += encoder.event(e)
    seen = told(stream)
    assert [e["sequence_number"] for e in seen] == list(range(len(seen)))
    whole = json.loads(DIALECT.whole(answer(asked), events))
    assert seen[-1]["response"] == whole
    assert seen[-1]["type"] == ("response.incomplete" if events[-1].reason == "length" else "response.completed")
    # The client's own accumulation accepts every step, and both ways of reading give the same.
    state = ResponseStreamState(input_tools=TOOLS, text_format=omit)
    for e in seen:
        typed = EVENT.validate_python(e)
        assert typed.type == e["type"]
        state.handle_event(typed)
    assert Response.model_validate(whole).output == EVENT.validate_python(seen[-1]).response.output
    check_increments(seen, whole)


def check_increments(seen: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Items are added in order, grow only while open, and end as what the response holds."""
    grown: dict[tuple[int, str], str] = {}
    added: list[str] = []
    done: dict[int, Any] = {}
    for e in seen:
        kind = e["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert e["output_index"] == len(added)
            added.append(e["item"]["id"])
        elif kind == "output_item.done":
            assert e["output_index"] not in done and e["item"]["id"] == added[e["output_index"]]
            done[e["output_index"]] = e["item"]
        elif kind.endswith(".delta"):
            assert e["item_id"] == added[e["output_index"]] and e["output_index"] not in done
            key = (e["output_index"], kind.removesuffix(".delta"))
            grown[key] = grown.get(key, "") + e["delta"]
        elif kind.endswith(("_text.done", "arguments.done", "input.done")):
            value = next(e[k] for k in ("text", "arguments", "input") if k in e)
            assert grown.get((e["output_index"], kind.removesuffix(".done")), "") == value
    assert [done[i] for i in range(len(added))] == whole["output"]
    assert len(set(added)) == len(added)


def result(call: dict[str, Any]) -> dict[str, Any]:
    if call["type"] == "tool_search_call":
        return {"type": "tool_search_output", "call_id": call["call_id"], "tools": []}
    output: Any = [] if call["type"] == "shell_call" else "ok"
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": output}


@given(answers(), st.booleans(), st.sampled_from(("as it was", "content lost", "ids lost")))
@settings(max_examples=300)
def test_an_answer_comes_back_as_what_was_sampled(events, sealed, change):
    """What an answer's items are parsed to is, for the history's digests, the message that was sampled."""
    asked = request(include=["reasoning.encrypted_content"] if sealed else [])
    items = json.loads(DIALECT.whole(answer(asked), events))["output"]
    assume(items)
    ours, _ = fold(events)
    results = [result(i) for i in items if "call_id" in i]
    for i in items:
        if change == "content lost" and i["type"] == "reasoning":
            del i["content"]
        if change == "ids lost":
            # Harnesses that drop ids send the turn as one: reasoning, text, calls.
            assume(sum(i["type"] == "message" for i in items) <= 1)
            i.pop("id")
    again = request(input=[{"role": "user", "content": "go"}, *items, *results, {"role": "user", "content": "on"}])
    theirs = again.messages[1]
    assert history.step(0, theirs) == history.step(0, ours)
    assert [m["role"] for m in again.messages] == ["user", "assistant", *["tool"] * len(results), "user"]
    assert history.call_ids(theirs) == history.call_ids(ours)
    if change != "ids lost":
        assert theirs["refs"] == [ID]
    if change == "as it was" or (sealed and change == "content lost"):
        assert theirs.get("reasoning_content", "") == ours.get("reasoning_content", "")
    names = [c["function"]["name"] for c in theirs.get("tool_calls", ())]
    assert [m.get("name") for m in again.messages if m["role"] == "tool"] == names


def test_the_model_reads_every_tool_under_a_name_of_its_own():
    asked = request()
    names = [t["function"]["name"] for t in asked.tools]
    assert len(set(names)) == len(names) == 11
    by_name = {t["function"]["name"]: t["function"] for t in asked.tools}
    assert by_name["agents__spawn_2"]["description"] == "(agents: Agents.)\nd"
    assert "lark grammar" in by_name["apply_patch"]["description"]
    assert by_name["apply_patch"]["parameters"]["required"] == ["input"]
    assert asked.labels["dropped_tools"] == "mcp,web_search"


@given(words, words)
def test_sealed_text_opens_only_as_what_it_is(text, other):
    assert unseal("reasoning", seal("reasoning", ID, text)) == (ID, text)
    assert unseal("compaction", seal("reasoning", ID, text)) is None
    assert unseal("reasoning", other) is None and unseal("reasoning", "polar1." + other) is None
    assert completion_of(f"msg_{HEX}_0") == ID and completion_of(other) is None


RICH: dict[str, Any] = {
    "model": "m",
    "instructions": "x",
    "tools": TOOLS,
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]},
    "parallel_tool_calls": True,
    "temperature": 1,
    "top_p": 0.5,
    "max_output_tokens": 9,
    "max_tool_calls": 3,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "truncation": "auto",
    "background": None,
    "conversation": None,
    "previous_response_id": None,
    "prompt": None,
    "client_metadata": {"turn": "1"},
    "prompt_cache_key": "k",
    "service_tier": "auto",
    "top_logprobs": 0,
    "user": "u",
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "extra"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"},
                {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,w6k="},
            ],
        },
        {
            "type": "reasoning",
            "id": f"rs_{HEX}_0",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "r"}],
            "encrypted_content": seal("reasoning", ID, "r"),
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "c1", "name": "spawn", "namespace": "agents", "arguments": "{not json"},
        {"type": "function_call", "call_id": "c2", "name": "run", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "o"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "é"}, {"type": "input_image", "image_url": "http://x/y.png"}],
        },
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "p"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "o"}]},
        {
            "type": "local_shell_call",
            "id": "l",
            "call_id": "c4",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "c4", "output": "o"},
        {"type": "shell_call", "call_id": "c5", "action": {"commands": ["ls"], "timeout_ms": None}},
        {
            "type": "shell_call_output",
            "call_id": "c5",
            "output": [{"stdout": "o", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}],
        },
        {"type": "apply_patch_call", "call_id": "c6", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c6", "status": "failed", "output": "o"},
        {"type": "tool_search_call", "call_id": "c7", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "c7", "tools": [{"type": "function", "name": "found"}]},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "f", "queries": ["q"], "results": [{"text": "t"}]},
        {"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]},
        {"type": "image_generation_call", "id": "g", "result": "AAAA"},
        {"type": "mcp_list_tools", "id": "n", "server_label": "s", "tools": []},
        {"type": "mcp_call", "id": "p", "server_label": "s", "name": "n", "arguments": "{}", "output": "o"},
        {"type": "compaction", "encrypted_content": seal("compaction", ID, "before")},
        {"type": "configuration_update", "reasoning": {"effort": "high"}, "text": {"format": {"type": "text"}}},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "late"}]},
        {"type": "message", "role": "system", "content": "late"},
    ],
}


def places(value: Any, path: tuple = ()) -> list[tuple]:
    out = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for k, v in inner:
        out += places(v, (*path, k))
    return out


PLACES = places(RICH)
kinds = st.sampled_from(
    [t["type"] for t in RICH["input"] if "type" in t] + ["function", "custom", "namespace", "shell"]
)


@pytest.mark.parametrize("path", ["", "compact"])
def test_a_request_with_everything_is_understood(path):
    asked = DIALECT.parse(RICH, Call(params={"compact": path} if path else {}))
    assert asked.role == ("compaction" if path else None) and asked.stream is (not path) and asked.images == 3
    roles = "".join(m["role"][0] for m in asked.messages)
    assert roles == "ssuatt" + "at" * 5 + "at" * 5 + "uss" + ("u" if path else "")
    turn = asked.messages[3]
    assert turn["content"] == "ano" and turn["reasoning_content"] == "r" and turn["refs"] == [ID]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in turn["tool_calls"]] == [
        ("agents__spawn_2", "{not json"),
        ("run", "{}"),
    ]
    assert asked.messages[2]["content"].startswith("see\n[image image/png, ")
    assert asked.messages[2]["content"].endswith("[file a.txt]\né")
    assert asked.messages[5]["content"].startswith("é\n[image of unknown type, ")
    assert "late" not in {t["function"]["name"] for t in asked.tools} and asked.tools[-1]["function"]["name"] == "extra"
    assert asked.schema is None and asked.wishes["reasoning_effort"] == "high"


def put(at: Any, path: tuple, value: Any) -> None:
    """Change what is at the path, if an earlier change has left it there."""
    with contextlib.suppress(KeyError, IndexError, TypeError):
        for k in path[:-1]:
            at = at[k]
        at[path[-1]] = value


@given(st.lists(st.tuples(st.sampled_from(PLACES), trees | kinds), min_size=1, max_size=3), st.booleans())
@settings(max_examples=1500)
def test_no_request_is_worse_than_refused(changes, compact):
    body = copy.deepcopy(RICH)
    for path, value in changes:
        put(body, path, value)
    try:
        asked = DIALECT.parse(body, Call(params={"compact": "compact"} if compact else {}))
    except CallError as e:
        assert e.status == 400 and e.param and e.message
        return
    assert all(isinstance(m["content"], str) for m in asked.messages)
    assert all(isinstance(c["function"]["arguments"], str) for m in asked.messages for c in m.get("tool_calls", ()))
    msgspec.json.encode([asked.messages, asked.tools])
    finish = Finish(reason="stop", usage=Usage(prompt_tokens=1, sampled_tokens=1))
    json.loads(DIALECT.whole(answer(asked), [Text("x"), ToolCall("c", "run", "{}"), finish]))
    DIALECT.encoder(answer(asked)).event(finish)


@given(st.dictionaries(st.sampled_from(list(RICH)), trees))
def test_a_body_of_nonsense_is_refused_or_read(body):
    try:
        DIALECT.parse(body, Call())
    except CallError as e:
        assert e.status == 400 and e.param


def test_a_retry_is_the_same_call_whatever_surrounds_it():
    one = request(stream=True, client_metadata={"turn": 1}, metadata={"a": "1"}, prompt_cache_key="x")
    two = request(stream=False, client_metadata={"turn": 2}, service_tier="flex", include=["x"])
    assert one.identity == two.identity != request(temperature=0.5).identity
    body = {"model": "m", "tools": TOOLS, "input": "go"}
    assert DIALECT.parse(body, Call(params={"compact": "compact"})).identity != one.identity
