"""Text comes out piece by piece, is never taken back, and costs no more for what is no text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.decoder import TextDecoder


def byte_level(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def byte_fallback(ids: list[int]) -> str:
    """As tokenizers with a byte fallback decode: a run of bytes that is no text is nothing but replacements. Letters are
    tokens of their own."""
    out = ""
    for letters, run in itertools.groupby(ids, lambda i: 97 <= i <= 122):
        data = bytes(run)
        try:
            out += data.decode()
        except UnicodeDecodeError:
            assert not letters
            out += "\ufffd" * len(data)
    return out


CHARACTERS = [0x61, 0x7A, 0x20, 0x80, 0x9F, 0xA9, 0xBD, 0xC3, 0xE4, 0xF0, 0xFF]
GARBAGE = st.lists(st.sampled_from(CHARACTERS), min_size=0, max_size=90)
TEXT = st.text(alphabet="aé箱🎁", max_size=40).map(lambda t: list(t.encode()))


@given(parts=st.lists(GARBAGE | TEXT, max_size=4), size=st.integers(1, 5))
@example(parts=[[0xC3] * 200, list("é箱".encode())], size=1)
@example(parts=[list("🎁".encode()) * 20 + [0xF0], [0x9F, 0x8E, 0x81]], size=3)
@example(parts=[[0xF0, 0x9F, 0x8E] * 30, [0x81], [0x61]], size=1)
def test_what_is_out_is_never_taken_back(parts, size):
    ids = [i for part in parts for i in part]
    decoder, out = TextDecoder(byte_level), ""
    for at in range(0, len(ids), size):
        out += decoder.push(ids[at : at + size])
        assert byte_level(ids[: at + size]).startswith(out)
    assert byte_level([*ids, 0x61]) == out + decoder.push([0x61])


@given(text=st.text(alphabet="é箱🎁", min_size=1, max_size=60), size=st.integers(1, 7))
@example(text="🎁" * 60, size=7)
def test_a_run_of_bytes_is_text_once_it_is_whole(text, size):
    ids = list(text.encode())
    decoder = TextDecoder(byte_fallback)
    assert "".join(decoder.push(ids[at : at + size]) for at in range(0, len(ids), size)) == text


@pytest.mark.parametrize("decode", [byte_level, byte_fallback])
@pytest.mark.parametrize("token", [[0xC3], [0x80], [0xF0, 0x9F]])
def test_half_characters_cost_as_much_as_text(decode, token):
    decoded = 0

    def counted(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    decoder, out = TextDecoder(counted), ""
    for i in token * 2000:
        out += decoder.push([i])
    assert decode(token * 2000).startswith(out) and len(out) > 1900
    assert decoded < 100 * 2000 * len(token)
