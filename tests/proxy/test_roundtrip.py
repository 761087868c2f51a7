"""Any conversation, in any dialect, in any chunks: what is sampled, sent, stored and continued is one and the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy import body as bodies
from proxy.dialects import DIALECTS
from proxy.dialects.base import Answer
from proxy.history import normal_arguments
from proxy.stream_parser import StreamParser
from tests.proxy.neutral_session import NeutralSession
from tests.proxy.roundtrip_clients import CLIENTS, Client

# Characters of several bytes, of several characters, and such as are cut, joined or dropped on the way elsewhere.
_SPECIAL = [
    "é",
    "e\u0301",
    "🎁",
    "👩\u200d👩\u200d👧",
    "箱",
    "\u2028",
    "\x7f",
    "\ufeff",
    "\u202e",
    "\U0010fffd",
    "\\",
    '"',
    "\n",
    " ",
    "{",
]
_text = st.lists(st.sampled_from(_SPECIAL) | st.text(st.characters(codec="utf-8"), max_size=6), max_size=8).map("".join)
_said = _text.filter(lambda t: not any(w in t for w in ("<think", "<tool", "</t", "<|")))
_scalar = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | _text | st.just("\ud83d cut")
)
_arguments = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=4),
    st.recursive(_scalar, lambda v: st.lists(v, max_size=3) | st.dictionaries(_text, v, max_size=2), max_leaves=4)
    | _text.map(lambda t: t * 200),
    max_size=3,
)
_turn = st.fixed_dictionaries(
    {
        "reasoning": _said.map(str.strip),
        "text": _said,
        "calls": st.lists(_arguments, max_size=2),
        "next": _text,
        "sizes": st.lists(st.integers(1, 7), max_size=60),
        "stream": st.booleans(),
    }
)


def sampled(turn: dict) -> str:
    """What a model would have written."""
    out = f"<think>\n{turn['reasoning']}\n</think>\n\n" if turn["reasoning"] else ""
    out += turn["text"]
    for arguments in turn["calls"]:
        call = {"name": "run", "arguments": arguments}
        try:
            text = json.dumps(call, ensure_ascii=False)
            text.encode()
        except UnicodeEncodeError:
            text = json.dumps(call)
        out += f"\n<tool_call>\n{text}\n</tool_call>"
    return out


def value(arguments) -> object:
    return normal_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(system=_text, first=_text, turns=st.lists(_turn, min_size=1, max_size=4))
async def test_conversations(codec, dialect, system, first, turns):
    if dialect.name not in CLIENTS:
        pytest.skip(f"no round-trip client for {dialect.name} yet: add it to roundtrip_clients.py")
    client: Client = CLIENTS[dialect.name]()
    session = NeutralSession(codec)
    client.ask(first or "Go.")
    for n, turn in enumerate(turns):
        served, answers = await one_call(codec, session, dialect, client, system, turn)
        c = served.completion
        # Both forms of the answer say the same, and what was sampled.
        whole, streamed = (client.said(a) for a in answers)
        assert whole == streamed and whole.reasoning == turn["reasoning"]
        assert [(name, value(arguments)) for _, name, arguments in whole.calls] == [
            ("run", value(json.dumps(a))) for a in turn["calls"]
        ]
        assert whole.text.strip() == turn["text"].strip()
        # What was captured is what was sampled.
        assert codec.decode(c.sampled_ids.tolist()) == sampled(turn) + codec.decode(c.sampled_ids[-1:].tolist())
        assert c.link == ("continued" if n else "first"), c.link_reason
        client.echo(answers[turn["stream"]])
        if whole.calls:
            client.results(whole.calls, [turn["next"]] * len(whole.calls))
        else:
            client.ask(turn["next"] or "Go on.")


async def one_call(codec, session: NeutralSession, dialect, client: Client, system: str, turn: dict):
    """Through the dialect and back: (what was served, (whole answer, streamed answer))."""
    raw = json.dumps(client.body(system or "You are.", turn["stream"]), ensure_ascii=True).encode()
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        body = bodies.decode(raw)  # as the proxy reads half surrogate pairs
    request = dialect.parse(body, client.call(True))
    assert dialect.parse(body, client.call(False)).messages == request.messages
    request.model = "policy"
    served = await session.serve(request, sampled(turn), turn["sizes"])
    c = served.completion
    answer = Answer(
        id=c.completion_id, model="m", created=1, request=request, prompt_tokens=c.prompt_length, context_length=4096
    )
    encoder = dialect.encoder(answer)
    out = [encoder.start()]
    for n, e in enumerate(served.events):
        if n % 3 == 0:
            out.append(encoder.heartbeat())
        out.append(encoder.event(e))
    for piece in out:
        piece.decode("utf-8")  # no piece ends inside a character
        assert b"\xef\xbf\xbd" not in piece or "\ufffd" in sampled(turn)
    whole = json.loads(dialect.whole(answer, served.events))
    return served, (whole, client.stream(b"".join(out)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(turn=_turn, cut=st.integers(0, 400))
def test_a_sample_cut_anywhere_contradicts_nothing(codec, turn, cut):
    ids = codec._tokenizer.encode(sampled(turn), add_special_tokens=False)[:cut]
    parser = StreamParser(codec, [], [{"type": "function", "function": {"name": "run"}}], True, [], "call")
    events, at = [], 0
    for n in [*turn["sizes"], len(ids)]:
        events += parser.feed(ids[at : at + n])
        at += n
    message, _ = parser.finish(None)  # raises Contradiction
    sent = "".join(e.text for e in events if hasattr(e, "text"))
    assert len(sent) <= len(message["content"]) + len(message.get("reasoning_content", ""))
