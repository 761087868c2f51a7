"""What each harness makes of a turn when it sends it back, and whether that turn is still the policy's own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import echo, history
from tests.proxy.neutral_session import NeutralSession, call, result, system, user

HEAD = [system("Be careful."), user("List.")]
SAID = {"command": "ls é 🎁 \u200d", "n": 1.0, "deep": {"b": [1e3, -0.0, 2**60], "a": None}, "m": "<tool_call>"}


@pytest.fixture
def session(codec) -> NeutralSession:
    return NeutralSession(codec)


def with_call(turn: dict, **function) -> dict:
    (c,) = turn["tool_calls"]
    return {**turn, "tool_calls": [{**c, "function": {**c["function"], **function}}]}


def arguments(turn: dict) -> dict:
    return json.loads(turn["tool_calls"][0]["function"]["arguments"])


def javascript(value):
    """JSON.stringify(JSON.parse(…)): doubles, whole ones without a point."""
    if isinstance(value, dict):
        return {k: javascript(v) for k, v in value.items()}
    if isinstance(value, list):
        return [javascript(v) for v in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
    return value


# (name, what the harness makes of the turn, the link, a word of the reason)
QUIRKS = [
    ("verbatim", lambda t: t, "continued", ""),
    ("compact", lambda t: with_call(t, arguments=json.dumps(arguments(t), separators=(",", ":"))), "continued", ""),
    ("escaped", lambda t: with_call(t, arguments=json.dumps(arguments(t), ensure_ascii=True)), "continued", ""),
    ("as JavaScript", lambda t: with_call(t, arguments=json.dumps(javascript(arguments(t)))), "continued", ""),
    ("keys reordered", lambda t: with_call(t, arguments=json.dumps(arguments(t), sort_keys=True)), "continued", ""),
    (
        "Claude Code couldn't parse it",
        lambda t: with_call(
            t,
            arguments=json.dumps(
                {"__unparsedToolInput": {"raw": t["tool_calls"][0]["function"]["arguments"], "len": 9}}
            ),
        ),
        "continued",
        "",
    ),
    (
        "Claude Code filled in a default",
        lambda t: with_call(t, arguments=json.dumps({**arguments(t), "replace_all": False})),
        "continued",
        "",
    ),
    (
        "a value added that changes the call",
        lambda t: with_call(t, arguments=json.dumps({**arguments(t), "replace_all": True})),
        "rewritten",
        "edited",
    ),
    (
        "opencode couldn't run it",
        lambda t: with_call(t, name="invalid", arguments='{"tool": "run", "error": "no such tool"}'),
        "continued",
        "",
    ),
    ("text trimmed", lambda t: {**t, "content": t["content"].strip()}, "continued", ""),
    ("reasoning trimmed", lambda t: {**t, "reasoning_content": t["reasoning_content"].rstrip()}, "continued", ""),
    ("reasoning dropped", lambda t: {k: v for k, v in t.items() if k != "reasoning_content"}, "continued", ""),
    (
        "reasoning made text",
        lambda t: {**t, "reasoning_content": "", "content": f"{t['reasoning_content']}\n{t['content']}"},
        "continued",
        "",
    ),
    # Edits. The prompt must be what the harness says now.
    ("emptied (pi does it to invalid ones only)", lambda t: with_call(t, arguments="{}"), "rewritten", "calls"),
    ("other arguments", lambda t: with_call(t, arguments='{"command": "rm"}'), "rewritten", "calls"),
    ("renamed", lambda t: with_call(t, name="read"), "rewritten", "calls"),
    (
        "invalid of another tool",
        lambda t: with_call(t, name="invalid", arguments='{"tool": "read", "error": "x"}'),
        "rewritten",
        "calls",
    ),
    (
        "other raw text",
        lambda t: with_call(t, arguments='{"__unparsedToolInput": {"raw": "{}", "len": 2}}'),
        "rewritten",
        "calls",
    ),
    ("call left out", lambda t: {k: v for k, v in t.items() if k != "tool_calls"}, "rewritten", "calls"),
    ("other text", lambda t: {**t, "content": "I refuse."}, "rewritten", "text"),
    ("other reasoning", lambda t: {**t, "reasoning_content": "I plot."}, "rewritten", "reasoning"),
    ("a word of the reasoning", lambda t: {**t, "reasoning_content": "therefore"}, "rewritten", "reasoning"),
    (
        "reasoning made other text",
        lambda t: {**t, "reasoning_content": "", "content": "I plot. So."},
        "rewritten",
        "text",
    ),
]


@pytest.mark.parametrize("quirk, link, reason", [q[1:] for q in QUIRKS], ids=[q[0] for q in QUIRKS])
async def test_quirks(session, quirk, link, reason):
    function = json.dumps({"name": "run", "arguments": SAID}, ensure_ascii=False)
    turn, said = await session.ask(
        HEAD, f"<think>\nI think, therefore.\n</think>\n\n So.\n<tool_call>\n{function}\n</tool_call>"
    )
    back = quirk(turn)
    follow = [result(back)] if back.get("tool_calls") else [user("?")]
    answer, c = await session.ask([*HEAD, back, *follow], "Done.")
    assert c.link == link and reason in c.link_reason
    if link == "continued":
        assert c.parent_id == said.completion_id
    # The echo stays in the history: the turns after it go on from there.
    _, d = await session.ask([*HEAD, back, *follow, answer, user("Next.")])
    assert (d.link, d.parent_id) == ("continued", c.completion_id)


async def test_an_echo_counts_only_where_it_was_said(session):
    """The id of a call of another history, with the marks of an echo: what was called there is not put here."""
    secret, _ = await session.ask([system("Secret."), user("x")], call(command="cat secret"))
    turn, _ = await session.ask(HEAD, "Hello.")
    lie = with_call(secret, name="invalid", arguments='{"tool": "run", "error": "x"}')
    _, c = await session.ask([*HEAD, turn, user("Go."), lie, result(lie)])
    text = session.codec.decode(session.attempt.prompt(session.node(c)).tolist())
    assert c.link == "rewritten" and "secret" not in text and "invalid" in text


def test_arguments_that_were_no_object_may_come_back_empty():
    """Formats with free-form arguments: only there does pi put `{}`."""
    ours = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "r", "arguments": "{bad"}}],
    }
    theirs = {**ours, "tool_calls": [{"id": "1", "function": {"name": "r", "arguments": "{}"}}]}
    assert echo.of(ours, theirs) and not echo.of(theirs, ours)
    assert not echo.of(ours, {**theirs, "tool_calls": [{**theirs["tool_calls"][0], "id": "2"}]})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), _json, max_size=4), st.booleans(), st.booleans())
def test_formatting_of_arguments_never_counts_and_values_always_do(value, ascii_only, sort):
    one = json.dumps(value, ensure_ascii=False)
    other = json.dumps(javascript(value), ensure_ascii=ascii_only, sort_keys=sort, separators=(",", ":"))
    normal = history.normal_arguments(one)
    assert normal == history.normal_arguments(other)
    assert history.normal_arguments(json.dumps({**value, "more": 1})) != normal or value.get("more") == 1


def test_only_arguments_of_very_many_values_are_taken_to_the_letter():
    """Walking through them would hold up all streams; a long text in one is no matter."""
    for value, walked in (([0] * 1000, True), ("a, [b]" * 10_000, True), ([0] * 10_000, False), ([{}] * 10_000, False)):
        plain, spaced = (json.dumps({"a": value, "b": 1}, indent=i) for i in (None, 1))
        assert (history.normal_arguments(plain) == history.normal_arguments(spaced)) == walked
        assert (history.normal_arguments(plain) == plain) != walked


@given(st.text(), st.text())
def test_different_messages_have_different_digests(a, b):
    assert (history.step(1, user(a)) == history.step(1, user(b))) == (a == b)
    assert history.step(1, user(a)) != history.step(1, system(a)) and history.step(1, user(a)) != history.step(
        2, user(a)
    )


def test_dense_arguments_are_taken_to_the_letter(monkeypatch):
    """Decoding them would hold up all streams; and what was emptied is not what couldn't be parsed."""
    many = json.dumps({"n": list(range(3 * history._VALUES))})
    function = {"name": "run", "arguments": many}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    read: list[str] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(text) or loads(text))
    assert echo.of(said, with_call(said, arguments=f" {many}\n"))
    for other in ("{}", many.replace(", ", ","), many[:-1] + ', "more": false}'):
        assert not echo.of(said, with_call(said, arguments=other)), other[:9]
    assert echo.of(said, with_call(said, arguments=json.dumps({"__unparsedToolInput": {"raw": many}})))
    assert not [text for text in read if text.startswith('{"n"')]
