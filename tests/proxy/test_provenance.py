"""What harnesses say of themselves becomes labels, whatever they say, and nothing else."""

from __future__ import annotations

import json

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.codec import pack
from proxy import provenance
from proxy.neutral import Request


def tools(*names: str) -> list[dict]:
    return [{"type": "function", "function": {"name": n}} for n in names]


def marked(headers: dict | None = None, body: dict | None = None, names: tuple[str, ...] = ("run",), **said) -> Request:
    request = Request(model="m", messages=[{"role": "user", "content": "x"}], tools=tools(*names), **said)
    provenance.mark(request, headers or {}, body or {})
    return request


BILLING = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=sdk-cli;"
USER = json.dumps({"device_id": "d" * 64, "session_id": "s-1"})
TURN = json.dumps({"request_kind": "turn", "turn_id": "t", "thread_source": "user"})
COMPACTION = json.dumps({"request_kind": "compaction"})
SESSION = {"x-claude-code-session-id": "s-1"}
CODEX = {"session-id": "s-1", "thread-id": "t-1", "x-codex-window-id": "t-1:0"}


@pytest.mark.parametrize(
    "headers, body, names, role, labels",
    [
        (SESSION, {}, ("Bash",), "main", {"harness": "claude_code", "session": "s-1"}),
        (SESSION | {"x-claude-code-agent-id": "a"}, {}, ("Bash",), "subagent", {"agent": "a"}),
        (
            SESSION | {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
            {},
            ("Bash",),
            "subagent",
            {"agent": "b", "parent_agent": "a"},
        ),
        (
            {},
            {"system": [{"type": "text", "text": BILLING}], "metadata": {"user_id": USER}},
            ("Bash",),
            "main",
            {"entrypoint": "sdk-cli", "session": "s-1"},
        ),
        ({}, {"system": [{"text": f"{BILLING} cc_is_subagent=true;"}]}, ("Bash",), "subagent", {}),
        (CODEX | {"x-codex-turn-metadata": TURN}, {}, ("exec",), "main", {"kind": "turn", "window": "t-1:0"}),
        (CODEX | {"x-codex-turn-metadata": COMPACTION}, {}, (), "compaction", {"kind": "compaction"}),
        (CODEX, {"client_metadata": {"x-codex-turn-metadata": COMPACTION}}, (), "compaction", {"thread": "t-1"}),
        (
            CODEX | {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t-0"},
            {},
            ("exec",),
            "subagent",
            {"subagent": "collab_spawn", "parent_thread": "t-0"},
        ),
        ({"x-session-id": "ses_1", "x-session-affinity": "ses_1"}, {}, ("bash",), "main", {"harness": "opencode"}),
        ({"x-session-id": "ses_1"}, {}, (), None, {"session": "ses_1"}),
        ({"x-session-id": "b", "x-parent-session-id": "a"}, {}, ("bash",), "subagent", {"parent_session": "a"}),
        ({"session_id": "p", "x-session-affinity": "p"}, {}, ("bash",), "main", {"harness": "pi", "session": "p"}),
        ({}, {"contents": []}, ("complete_task", "ls"), "subagent", {}),
        ({}, {"contents": []}, ("complete_task", "invoke_agent"), None, {}),
        ({}, {}, ("complete_task",), None, {}),
        ({"x-polar-role": "Auxiliary"}, {}, ("run",), "auxiliary", {}),
        ({"x-polar-role": "root"}, {}, ("run",), None, {}),
        ({}, {}, (), None, {}),
    ],
)
def test_markers(headers, body, names, role, labels):
    request = marked(headers, body, names)
    assert request.role == role and labels.items() <= request.labels.items()


def test_a_judge_with_a_schema_is_auxiliary():
    assert marked(names=(), schema={"type": "object"}).role == "auxiliary"
    assert marked(names=("run",), schema={"type": "object"}).role is None


@pytest.mark.parametrize(
    "count, retry",
    [("0", False), ("", False), ("1", True), ("12", True), ("-1", False), ("²", False), ("9" * 99, False)],
)
def test_marked_retries(count, retry):
    assert marked({"x-stainless-retry-count": count}).marked_retry is retry
    assert not marked().marked_retry


_NAMES = [n for names in provenance._HEADERS.values() for n in names] + ["x-polar-role", "x-stainless-retry-count"]
_value = st.text() | st.sampled_from(["x" * 1_000_000, "[" * 9000, "\ud800", "{}", '{"request_kind": {"a": 1}}'])
_junk = st.recursive(
    st.none() | st.integers() | _value, lambda v: st.lists(v, max_size=3) | st.dictionaries(_value, v, max_size=3)
)


@given(
    headers=st.dictionaries(st.sampled_from(_NAMES), _value),
    body=st.dictionaries(
        st.sampled_from(["system", "metadata", "client_metadata", "contents"]),
        _junk
        | st.just({"user_id": '{"session_id": 3}'})
        | st.just([{"text": None}])
        | st.just({"user_id": "[" * 9000}),
    ),
)
def test_garbage_is_bounded_and_never_raises(headers, body):
    request = marked(headers, body)
    assert len(request.labels) <= provenance.LABELS and all(
        len(v) <= provenance.LENGTH for v in request.labels.values()
    )
    pack(request.labels)
    assert request.role in (None, *provenance._ROLES)


async def test_labels_are_stored_and_decide_nothing(world):
    """The same conversation, each turn with other claims: one chain, and the labels beside it."""
    capability, grant = world.mint()
    messages = [{"role": "user", "content": "go"}]
    claims = [
        SESSION | {"x-claude-code-agent-id": "a"},
        CODEX,
        {"x-polar-role": "auxiliary"},
        {"x-session-id": "z" * 5000},
    ]
    async with aiohttp.ClientSession() as http:
        for n, headers in enumerate(claims):
            world.says(f"Answer {n}.")
            body = {"model": "m", "messages": messages, "tools": tools("run")}
            url = f"{world.server.url}/s/{capability}/v1/chat/completions"
            async with http.post(url, json=body, headers=headers) as response:
                answer = json.loads(await response.read())["choices"][0]["message"]
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": f"{n}"}]
    stored = world.stored(grant)
    assert [c.link for c in stored] == ["first", "continued", "continued", "continued"]
    assert [c.role for c in stored] == ["subagent", "main", "auxiliary", "main"]
    assert [c.labels.get("harness") for c in stored] == ["claude_code", "codex", None, "opencode"]
    assert len(stored[3].labels["session"]) == provenance.LENGTH
    world.check_prompts(grant)
