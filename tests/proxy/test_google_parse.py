"""Google requests to neutral ones: what is refused, what means the same, and our own answers on their way back."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy import history
from proxy.dialects import google_signature
from proxy.dialects.base import Answer, Call
from proxy.dialects.google import Google
from proxy.dialects.google_tools import json_schema
from proxy.failures import CallError
from proxy.neutral import Event, Finish, Reasoning, Request, Text, ToolCall, Usage, fold
from tests.proxy.bodies import JSON, mutated

GO = {"role": "user", "parts": [{"text": "go"}]}
COMPLETION = "c-0123456789abcdef01234567"


def parse(body: dict[str, Any], verb: str = "generateContent", **query: str) -> Request:
    return Google().parse(body, Call(params={"model": "m", "verb": verb}, query=query))


def model(*parts: Any, role: str = "model") -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def call(name: str, args: dict | None = None, **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args or {}, **more}}


def result(name: str, value: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": value}, **more}}


def answered(messages: list[dict]) -> list[tuple[str, str]]:
    """(name of the call, result) for every tool message, by id."""
    names = {c["id"]: c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
    return [(names[m["tool_call_id"]], m["content"]) for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize(
    "change, field",
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [{"role": "user", "parts": []}]}, "contents"),
        ({"contents": 3}, "contents"),
        ({"contents": [3]}, "contents[0]"),
        ({"contents": [GO, {"role": "wizard", "parts": [{"text": ""}]}]}, "contents[1].role"),
        ({"contents": [{"parts": [{"text": 3}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{"hologram": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": 3}}]}]}, "contents[0].parts[0].inlineData.data"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "text/plain", "data": "a"}}]}]}, "contents[0].parts[0].inlineData.data"),
        ({"contents": [{"parts": [call("f")]}]}, "contents[0].parts[0]"),
        ({"contents": [GO, model({"functionCall": {"args": {}}})]}, "contents[1].parts[0].functionCall.name"),
        ({"contents": [GO, model({"functionCall": {"name": "f", "args": []}})]}, "contents[1].parts[0].functionCall.args"),
        (
            {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": "x"}}]}]},
            "contents[0].parts[0].functionResponse.response",
        ),
        ({"systemInstruction": 3}, "systemInstruction"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts[0]"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"continuationToken": "eA=="}, "continuationToken"),
        ({"tools": [{"functionDeclarations": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}]}, "tools"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        (
            {
                "tools": [{"functionDeclarations": [{"name": "a"}]}],
                "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["a", "b"]}},
            },
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"tools": [{"googleSearch": {}}]}, "tools"),
        ({"tools": [{"functionDeclarations": [{"name": ""}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": 3}}]}]},
            "tools[0].functionDeclarations[0].parameters.type",
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"stopSequences": [3]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"responseModalities": ["TEXT", "AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": {"type": "OBJECT"}}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": 3}}, "generationConfig.responseJsonSchema"),
        ({"generationConfig": {"thinkingConfig": {"includeThoughts": "yes"}}}, "generationConfig.thinkingConfig.includeThoughts"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_naming_the_field(change, field):
    with pytest.raises(CallError) as e:
        parse({"contents": [GO], **change})
    assert e.value.param == field and field in e.value.message and e.value.status == 400


RICH: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be careful."}]},
    "contents": [
        GO,
        model({"text": "Hm.", "thought": True}, {"text": "Ok.", "thoughtSignature": "x"}, call("run", {"a": [1]}, id="1")),
        {"role": "function", "parts": [result("run", id="1", parts=[{"inlineData": {"mimeType": "image/png", "data": "AA=="}}])]},
        model({"executableCode": {"language": "PYTHON", "code": "1"}}, {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}}),
        model({"fileData": {"fileUri": "gs://x", "mimeType": "application/pdf"}, "videoMetadata": {}}, role="user"),
    ],
    "tools": [{"functionDeclarations": [{"name": "run", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["run"]}},
    "generationConfig": {
        "temperature": 1, "topP": 0.9, "topK": 3, "seed": 1, "candidateCount": 1, "maxOutputTokens": 5,
        "stopSequences": ["x"], "responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"},
        "responseModalities": ["TEXT"], "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5},
    },
    "safetySettings": [],
    "labels": {"a": "b"},
}  # fmt: skip


def test_the_rich_body_is_served():
    r = parse(RICH)
    assert [m["role"] for m in r.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert r.images == 2 and r.schema == {"type": "object"} and r.tool_choice == "required"
    assert r.wishes["thinking"] == {"includeThoughts": True, "thinkingBudget": 5}
    assert r.labels == {"ignored_fields": "labels,safetySettings"}


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_wrong_types_are_refused_and_never_crash(data):
    body = mutated(data, RICH)
    try:
        r = parse(body, data.draw(st.sampled_from(["generateContent", "streamGenerateContent", "countTokens"])))
    except CallError as e:
        assert e.kind == "bad_request" and e.param
        json.loads(Google().error(e)[1])
    else:
        msgspec.json.encode(r)
        assert all(isinstance(m["content"], str) for m in r.messages)


@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(st.sampled_from([*RICH, "generation_config", "generateContentRequest"]), JSON, max_size=4))
def test_any_json_is_refused_or_served(body):
    try:
        parse(body)
    except CallError as e:
        assert e.kind == "bad_request"


def test_deep_nesting_is_refused():
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"type": "OBJECT", "properties": {"a": deep}}
    with pytest.raises(CallError):
        parse({"contents": [GO], "tools": [{"functionDeclarations": [{"name": "f", "parameters": deep}]}]})


words = st.text(st.characters(codec="utf-8"), max_size=20)
arguments = st.dictionaries(words, JSON, max_size=3).map(lambda a: json.dumps(a, ensure_ascii=False))


@st.composite
def events(draw: Any) -> list[Event]:
    """A sample's events: reasoning, text and calls in pieces."""
    out: list[Event] = [Reasoning(t) for t in draw(st.lists(words.filter(bool), max_size=3))]
    out += [Text(t) for t in draw(st.lists(words.filter(bool), max_size=4))]
    names = draw(st.lists(st.sampled_from(["run", "look", "a.b-c"]), max_size=3))
    out += [ToolCall(f"call_{COMPLETION[2:]}_{i}", n, draw(arguments)) for i, n in enumerate(names)]
    reason = draw(st.sampled_from(["stop", "length"]))
    return [*out, Finish(reason=reason, usage=Usage(prompt_tokens=5, sampled_tokens=7))]


def encode(sample: list[Event], form: str, thoughts: bool) -> list[dict[str, Any]]:
    """The contents that a client gets."""
    request = Request(model="m", messages=[], extra={"sse": form == "sse", "thoughts": thoughts})
    answer = Answer(id=COMPLETION, model="m", created=0, request=request)
    dialect = Google()
    if form == "whole":
        return [json.loads(dialect.whole(answer, sample))]
    encoder = dialect.encoder(answer)
    raw = encoder.start() + b"".join(encoder.event(e) + encoder.heartbeat() for e in sample)
    if form == "array":
        return json.loads(raw)
    return [json.loads(e.strip().removeprefix(b"data: ")) for e in raw.split(b"\n\n") if e.strip()]


@settings(max_examples=200, deadline=None)
@given(
    sample=events(),
    form=st.sampled_from(["whole", "sse", "array"]),
    thoughts=st.booleans(),
    echo=st.sampled_from(["verbatim", "no ids", "Gemini CLI", "no signatures"]),
)
def test_our_own_answer_comes_back_as_the_same_message(sample, form, thoughts, echo):
    contents = [c["candidates"][0]["content"] for c in encode(sample, form, thoughts)]
    for part in [p for c in contents for p in c["parts"]]:
        f = part.get("functionCall")
        if f and echo == "no ids":
            del f["id"]
        elif f and echo == "Gemini CLI":
            f["id"] = f"{f['name']}__{f['id']}"
        elif echo == "no signatures":
            part.pop("thoughtSignature", None)
    if echo == "Gemini CLI":
        contents = [c | {"parts": [p for p in c["parts"] if not p.get("thought")]} for c in contents]
    ours, _ = fold(sample)
    user, theirs = parse({"contents": [GO, *contents]}).messages
    assert user == {"role": "user", "content": "go"}
    assert history.step(0, theirs) == history.step(0, ours)
    assert history.call_ids(theirs) == history.call_ids(ours)
    assert history.same_reasoning(ours.get("reasoning_content", ""), theirs.get("reasoning_content", ""))
    signed = echo != "no signatures" and (ours["content"] or ours.get("tool_calls"))
    assert theirs.get("refs", []) == ([COMPLETION] if signed else [])


@settings(max_examples=200, deadline=None)
@given(sample=events(), thoughts=st.booleans())
def test_every_form_of_an_answer_says_the_same(sample, thoughts):
    def added_up(form: str) -> tuple:
        chunks = encode(sample, form, thoughts)
        parts = [p for c in chunks for p in c["candidates"][0]["content"]["parts"]]
        texts = [
            "".join(p["text"] for p in parts if "text" in p and p.get("thought", False) is t) for t in (True, False)
        ]
        calls = [p for p in parts if "functionCall" in p]
        last = chunks[-1]
        return texts, calls, last["usageMetadata"], last["candidates"][0]["finishReason"], last["responseId"]

    assert added_up("whole") == added_up("sse") == added_up("array")


def test_results_find_their_calls_without_ids():
    turn = model(call("a"), call("b"), call("a"))
    r = parse({"contents": [GO, turn, model(result("b", "1"), result("a", "2"), result("a", "3"), role="user")]})
    ids = history.call_ids(r.messages[1])
    assert len(set(ids)) == 3
    assert [(m["tool_call_id"], m["content"]) for m in r.messages[2:]] == [(ids[1], "1"), (ids[0], "2"), (ids[2], "3")]


def test_results_find_their_calls_by_foreign_ids():
    turn = model(call("a", id="x"), call("a", id="y"))
    r = parse({"contents": [GO, turn, model(result("a", "1", id="y"), result("a", "2", id="x"), role="function")]})
    assert [m["tool_call_id"] for m in r.messages[2:]] == ["y", "x"]


def test_a_signature_restores_the_ids_that_a_client_made_up():
    signature = google_signature.issue(COMPLETION, "call_7_0")
    turn = model(call("run", id="uuid") | {"thoughtSignature": signature})
    r = parse({"contents": [GO, turn, model(result("run", "1", id="uuid"), role="user")]})
    assert history.call_ids(r.messages[1]) == ["call_7_0"] and r.messages[2]["tool_call_id"] == "call_7_0"
    assert r.messages[1]["refs"] == [COMPLETION]


@pytest.mark.parametrize(
    "garbage", ["skip_thought_signature_validator", "", "é", "cG9sYXIxIC4uLyB4", "AAAA", 3, "=" * 9, "x" * 9999]
)
def test_other_signatures_mean_nothing(garbage):
    r = parse({"contents": [GO, model({"text": "hi", "thoughtSignature": garbage})]})
    assert r.messages[1] == {"role": "assistant", "content": "hi"}


def test_text_between_results_keeps_its_place():
    parts = [{"text": "Before."}, result("a", "1"), {"text": "After."}]
    r = parse({"contents": [GO, model(call("a")), {"role": "user", "parts": parts}]})
    assert [(m["role"], m["content"]) for m in r.messages[2:]] == [
        ("user", "Before."),
        ("tool", "1"),
        ("user", "After."),
    ]


def test_results_are_told_whole():
    values = [{"output": {"a": 1}}, {"error": "no"}, {"output": "x", "error": "y"}, {}]
    parts = [{"functionResponse": {"name": "a", "response": v}} for v in values]
    r = parse({"contents": [GO, model(call("a")), model(*parts, role="user")]})
    assert [m["content"] for m in r.messages[2:]] == [
        '{"a": 1}',
        '{"error": "no"}',
        '{"output": "x", "error": "y"}',
        "",
    ]


def test_texts_in_files_are_read_and_the_rest_is_shown_as_missing():
    files = [
        ("text/markdown", "SGkh"),
        ("application/json", "e30="),
        ("application/pdf", "AAAA"),
        ("image/png", "AAAA"),
    ]
    r = parse({"contents": [model(*[{"inlineData": {"mimeType": m, "data": d}} for m, d in files], role="user")]})
    assert (
        r.messages[0]["content"].startswith("Hi!{}[file application/pdf, ")
        and "[image image/png, " in r.messages[0]["content"]
    )
    assert r.images == 2


def test_hosted_tools_beside_functions_are_left_out_for_the_record():
    tools = [{"google_search": {}}, {"functionDeclarations": [{"name": "f"}], "codeExecution": {}}]
    r = parse({"contents": [GO], "tools": tools})
    assert [t["function"]["name"] for t in r.tools] == ["f"] and r.labels[
        "dropped_tools"
    ] == "codeExecution,googleSearch"


@pytest.mark.parametrize(
    "mode, choice", [("AUTO", "auto"), ("ANY", "required"), ("none", "none"), ("VALIDATED", "auto")]
)
def test_function_calling_modes(mode, choice):
    tools = [{"functionDeclarations": [{"name": "a"}]}]
    r = parse({"contents": [GO], "tools": tools, "tool_config": {"function_calling_config": {"mode": mode}}})
    assert r.tool_choice == choice and r.wishes["tool_choice"] == {"mode": mode}


def test_schemas_of_answers():
    def schema(**config: Any) -> Any:
        return parse({"contents": [GO], "generationConfig": config}).schema

    assert schema() is None and schema(responseMimeType="text/plain") is None
    assert schema(responseMimeType="application/json") == {}
    assert schema(response_mime_type="application/json", response_json_schema={"type": "array"}) == {"type": "array"}


def test_openapi_schemas_become_json_schemas():
    given = {
        "type": "OBJECT",
        "properties": {
            "max_items": {"type": "ARRAY", "items": {"type": "STRING"}, "min_items": "2"},
            "when": {"type": "STRING", "nullable": True, "enum": ["a"], "example": "a"},
            "which": {"anyOf": [{"type": "INTEGER"}, {"type": "NUMBER"}], "nullable": True},
        },
        "property_ordering": ["when", "max_items"],
        "required": ["when"],
    }
    before = copy.deepcopy(given)
    out = json_schema(given, "x")
    assert out == {
        "type": "object",
        "properties": {
            "when": {"type": ["string", "null"], "enum": ["a", None], "examples": ["a"]},
            "max_items": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "which": {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]},
        },
        "required": ["when"],
    }
    assert list(out["properties"]) == ["when", "max_items", "which"] and given == before


def test_the_same_call_whatever_its_transport():
    body = {"contents": [GO], "labels": {"run": "1"}}
    same = [parse(body), parse(body | {"labels": {"run": "2"}}), parse(body, "streamGenerateContent", alt="sse")]
    assert len({r.identity for r in same}) == 1
    assert parse(body | {"generationConfig": {"seed": 1}}).identity != same[0].identity
    assert [r.stream for r in same] == [False, False, True] and same[2].extra["sse"] is True


@pytest.mark.parametrize("n", [50_000])
def test_very_many_parts_take_no_quadratic_time(n):
    """The test's own time limit would tell."""
    calls = [call("a") for _ in range(n)]
    texts = [{"text": "x" * 50}] * n
    r = parse({"contents": [GO, model(*texts), model(*calls), model(*[result("a")] * n, role="user")]})
    assert len(r.messages) == n + 2 and r.messages[-1]["tool_call_id"] == r.messages[1]["tool_calls"][-1]["id"]
