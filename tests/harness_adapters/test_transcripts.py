"""Transcripts joined to completions: by the ids that CLIs keep, else by what was said."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness_adapters import transcripts
from polar.codec import to_json
from polar.completion import Completion

A, B, C = ("c-01a228f81492e085608d2c24", "c-01a228f81516bee7c1bf345b", "c-01a228f81562c3e5715fc0ed")


def completion(index: int, name: str, content: str, call: bool = False) -> Completion:
    response: dict[str, Any] = {"role": "assistant", "content": content}
    if call:
        function = {"name": "bash", "arguments": "{}"}
        response["tool_calls"] = [{"id": f"call_{name[2:]}_0", "type": "function", "function": function}]
    ids = np.zeros(1, dtype="<i4")
    return Completion(
        completion_id=name, session_id="s", attempt=1, index=index, prompt_tail=ids, sampled_ids=ids,
        logprobs=np.zeros(1, dtype="<f4"), response=response,
    )  # fmt: skip


COMPLETIONS = [completion(0, A, "Look.", True), completion(1, B, "Then this.", True), completion(2, C, "All done.")]


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(v) + "\n" for v in values).encode()


def tar(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as t:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return out.getvalue()


def joined(name: str, data: bytes) -> list[tuple[int, str, int]]:
    found = transcripts.join(transcripts.read(name, data), COMPLETIONS)
    return [(e.line, e.kind, e.index) for e in found.entries if e.kind]


def test_claude_s_projects():
    def said(role: str, block: dict[str, Any], **more: str) -> dict[str, Any]:
        return {"type": role, "message": {"role": role, "content": [block], **more}}

    data = lines(
        {"type": "user", "message": {"role": "user", "content": "Do it."}},
        said("assistant", {"type": "text", "text": "Look."}, id=f"msg_{A}"),
        said("assistant", {"type": "tool_use", "id": f"call_{A[2:]}_0"}, id=f"msg_{A}"),
        said("user", {"type": "tool_result", "tool_use_id": f"call_{A[2:]}_0"}),
        said("assistant", {"type": "text", "text": "All done."}, id=f"msg_{C}"),
    )
    assert joined("~/x", tar(**{"-work/s.jsonl": data})) == [
        (2, "answer", 0),
        (3, "answer", 0),
        (4, "result", 0),
        (5, "answer", 2),
    ]
    found = transcripts.join(transcripts.read("~/x", tar(**{"-work/s.jsonl": data})), COMPLETIONS)
    assert found.missing == [B] and found.entries[0].file == "-work/s.jsonl"
    assert next(e.text for e in found.of(A)) == "Look."


def test_codex_sessions():
    data = lines(
        {"type": "session_meta", "payload": {"id": "t"}},
        {"type": "response_item", "payload": {"type": "message", "role": "assistant", "id": f"msg_{A[2:]}_0", "content": []}},
        {"type": "response_item", "payload": {"type": "function_call", "id": f"fc_{A[2:]}_1", "call_id": f"call_{A[2:]}_0"}},
        {"type": "response_item", "payload": {"type": "function_call_output", "call_id": f"call_{A[2:]}_0", "output": "x"}},
    )  # fmt: skip
    assert joined("rollout.jsonl", data) == [(2, "answer", 0), (3, "answer", 0), (4, "result", 0)]


def test_one_document_with_messages():
    data = json.dumps({"info": {"x": 1}, "messages": [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "Look.", "tool_calls": [{"id": f"call_{A[2:]}_0"}]},
        {"role": "tool", "tool_call_id": f"call_{A[2:]}_0", "content": "a"},
    ]}, indent=2).encode()  # fmt: skip
    assert joined("traj.json", data) == [(2, "answer", 0), (3, "result", 0)]


def test_by_text_where_no_id_is_kept():
    data = lines(
        {"type": "gemini", "content": "All  done."},
        {"type": "user", "content": "All done."},
        {"type": "gemini", "content": "Never."},
    )
    assert joined("chat.jsonl", data) == [(1, "answer", 2)]
    # Equal texts are given out in order.
    same = [completion(0, A, "Yes."), completion(1, B, "Yes.")]
    found = transcripts.join(transcripts.read("c.jsonl", lines(*[{"role": "assistant", "content": "Yes."}] * 3)), same)
    assert [e.index for e in found.entries] == [0, 1, 0] and not found.missing


def test_text_that_only_mentions_an_id_is_not_joined():
    data = lines({"role": "user", "content": f"What of call_{A[2:]}_0 and {B}?" + " Tell me." * 30})
    assert joined("x.jsonl", data) == []


def test_what_is_no_transcript_is_passed_over():
    assert joined("x", b"\x00\x01SQLite") == [] and joined("x.jsonl", b'{"a": \n[1]\n"s"\n') == []
    assert joined("x.json", b"[" * 100_000) == []


def test_an_archive_that_the_agent_made_is_no_trap():
    data = tar(**{"\udcff.jsonl": lines({"role": "assistant", "content": "\ud800 hi", "id": f"\udc00 msg_{A}"})})
    # It could hold more than there is memory, or break off: only plain archives are ours.
    for packed in (gzip.compress(data), gzip.compress(data)[:60], lzma.compress(data)[:-20], bz2.compress(data)):
        assert list(transcripts.read("~/sessions", packed)) == []
    (entry,) = transcripts.join(transcripts.read("~/sessions", data), COMPLETIONS).entries
    assert entry.index == 0 and b"?.jsonl" in to_json(entry)


def test_reading_is_bounded(monkeypatch):
    monkeypatch.setattr(transcripts, "MAX_ENTRIES", 10)
    assert len(list(transcripts.read("x.jsonl", lines(*[{"n": i} for i in range(50)])))) == 10
    monkeypatch.setattr(transcripts, "MAX_ENTRIES", 10**6)
    monkeypatch.setattr(transcripts, "MAX_BYTES", 100)
    assert len(list(transcripts.read("x", tar(a=lines(*[{"n": i} for i in range(50)]), b=lines({"n": 1}))))) < 30


KEYS = ["type", "role", "message", "content", "id", "payload", "part"]
JSON = st.recursive(
    st.none() | st.sampled_from([A, f"msg_{B}", f"call_{C[2:]}_0", "assistant", "text"]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=15,
)


@given(st.lists(JSON, max_size=8), st.binary(max_size=40))
def test_any_file_is_read(values, noise):
    data = lines(*values) + noise
    found = transcripts.join(transcripts.read("any.jsonl", data), COMPLETIONS)
    names = {c.completion_id for c in COMPLETIONS}
    assert all(not e.completion_id or e.completion_id in names for e in found.entries)
    assert set(found.missing) == names - {e.completion_id for e in found.entries}
