"""Bodies as JSON: read in pieces they mean what they mean in one, and what is too much is refused before it is read."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import body, pieces
from proxy.failures import CallError
from tests.proxy.bodies import JSON


@pytest.fixture
def small(monkeypatch):
    """Pieces so small that every text of a test has several."""
    monkeypatch.setattr(pieces, "PIECE", 16)
    monkeypatch.setattr(pieces, "_WINDOW", 7)


_text = st.text(st.sampled_from('ab\\"[{,é🙂 \n'), max_size=40)
_value = JSON | st.lists(st.dictionaries(_text, _text | st.lists(_text, max_size=3), max_size=4), max_size=6)


@given(st.dictionaries(_text, _value, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_pieces_add_up(given_body, indent, ascii_only):
    raw = json.dumps(given_body, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 16)
        patch.setattr(pieces, "_WINDOW", 7)
        assert pieces.decode(raw) == msgspec.json.decode(raw)
        outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", raw)
        assert pieces.values(raw) == pieces.values_at_most(outside)


def test_a_call_of_the_decoder_takes_in_no_more_than_a_piece_or_a_text():
    image = "A" * (3 << 20)
    block = {"type": "image", "source": {"type": "base64", "data": image}}
    calls = [{"role": "assistant", "content": [{"type": "tool_use", "input": {"n": n}}]} for n in range(20_000)]
    sent = {"messages": [{"role": "user", "content": [block, block]}, *calls], "tools": [{"name": "é" * 99}] * 5000}
    raw = json.dumps(sent).encode()
    sizes: list[int] = []

    def leaf(piece: Any) -> Any:
        sizes.append(len(piece))
        return msgspec.json.decode(piece)

    assert pieces.decode(raw, leaf) == sent
    assert [n for n in sizes if n > pieces.PIECE] == [len(image) + 2] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        '{"a": [1, 2',
        '{"a": "\\ud83d", "b": NaN}',
        '{"a": "long enough" "b"}',
        "[" * 100,
        '{"a": "\\x long enough"}',
        "x" * 40,
    ],
)
def test_what_is_no_json_is_refused(small, wrong):
    with pytest.raises(CallError) as e:
        body.decode(wrong.encode())
    assert e.value.kind == "bad_request"


@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_halves_of_surrogate_pairs_become_replacement_characters(monkeypatch, piece):
    monkeypatch.setattr(pieces, "PIECE", piece)
    sent = b'{"\\ud83d": 1, "a": [{"long enough to split": "x\\ud83dy"}, "\\ud83d\\ude00"]}'
    assert body.decode(sent) == {"\ufffd": 1, "a": [{"long enough to split": "x\ufffdy"}, "\U0001f600"]}


@pytest.mark.parametrize("value", ["1", "[]", '{"a":1}', '"",{}'])
def test_many_values_are_too_large_and_a_long_text_is_not(value):
    few = b'{"messages": ["' + b"a, [b] {c: 1}, " * 100_000 + b'"]}'
    assert len(body.decode(few)["messages"]) == 1
    with pytest.raises(CallError) as e:
        body.decode(b'{"messages": [' + (value.encode() + b",") * body.VALUES + b"1]}")
    assert e.value.kind == "too_large" and str(body.VALUES) in e.value.message
