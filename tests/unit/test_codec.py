"""What a person reads when a task or a settings file is wrong: the field, what was found, what is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.codec import convert, from_json, load_file, to_json
from polar.config import Settings
from polar.errors import InvalidTask
from polar.explain import SHOWN
from polar.task import AgentSpec, TaskRequest

GOOD = {"agent": {"harness": "x"}, "instruction": "go"}


def wrong(data: Any, typ: type = TaskRequest) -> InvalidTask:
    """The same message from the JSON and from the already parsed form."""
    with pytest.raises(InvalidTask) as one:
        convert(data, typ, "f.yaml")
    with pytest.raises(InvalidTask) as two:
        from_json(json.dumps(data), typ, "f.yaml")
    assert one.value.message == two.value.message
    return one.value


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"timeout_seconds": -5}, "timeout_seconds", "found -5, allowed: number > 0 and <= 604800"),
        ({"num_samples": "four"}, "num_samples", "found 'four', allowed: whole number >= 1 and <= 4096"),
        ({"max_turns": 0}, "max_turns", "found 0, allowed: whole number >= 1 or null"),
        ({"group": {"mode": "foo"}}, "group.mode", "found 'foo', allowed: 'min_k', 'strict'"),
        ({"schema_version": 2}, "schema_version", "found 2, allowed: 1"),
        ({"artifacts": "a"}, "artifacts", "found 'a', allowed: list of text"),
        ({"task_id": "../x"}, "task_id", "found '../x', allowed: text matching ^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"),
        ({"runtime": {"prepare": [3]}}, "runtime.prepare[0]", "found 3, allowed: mapping with"),
        (
            {"runtime": {"prepare": [{"type": "exec", "comand": "x"}]}},
            "runtime.prepare[0].comand",
            "unknown field; allowed: type, max_attempts, retry_backoff_seconds, command, cwd, env",
        ),
        (
            {"runtime": {"prepare": [{"type": "exc"}]}},
            "runtime.prepare[0].type",
            "found 'exc', allowed: 'exec', 'upload_dir', 'upload_file'",
        ),
        ({"runtime": {"prepare": [{}]}}, "runtime.prepare[0].type", "missing; needed: 'exec', 'upload_dir', 'upl"),
        ({"instruktion": "x"}, "instruktion", "unknown field; allowed: agent, instruction, task_id"),
        ({"labels": {"a": "b", "c": 3}}, "labels.c", "found 3, allowed: text"),
        ({"labels": {"ok": "b", "-": "x"}}, "labels", "key '-' is not allowed; allowed: text matching"),
        ({"retry": {"per_code": {"a": 1, "b": -1}}}, "retry.per_code.b", "found -1, allowed: whole number >= 0"),
        ({"agent": {"harness": "shell"}}, "agent", "the 'shell' harness needs 'command'"),
        ({"agent": None}, "agent", "found null, allowed: mapping with harness, import_path"),
        ({"group": {"mode": "min_k", "k": 3}}, "", "group.k is 3, allowed is at most num_samples (1)"),
    ],
)
def test_a_message_names_field_found_and_allowed(change, field, message):
    e = wrong(GOOD | change)
    assert e.field == field
    expected = f"f.yaml: {field}: {message}" if field else f"f.yaml: {message}"
    assert e.message.startswith(expected)


def test_missing_and_wrong_shape():
    assert wrong({"agent": {"harness": "x"}}).message == "f.yaml: instruction: missing; needed: text"
    assert wrong([1]).message.startswith("f.yaml: found a list, allowed: mapping with agent, instruction")
    with pytest.raises(InvalidTask, match="not valid JSON"):
        from_json(b"{", TaskRequest)
    with pytest.raises(InvalidTask, match="not valid JSON"):
        from_json(b'{"a": "\xff"}', TaskRequest)
    with pytest.raises(InvalidTask, match="key 3 is not allowed"):
        convert({**GOOD, 3: 4}, TaskRequest, "f.yaml")


def test_settings_name_the_row_of_a_table():
    row = {"engine": "http://e", "tokenizer": "t"}
    e = wrong({"models": {"good": row, "bad": row | {"context_length": 0}}}, Settings)
    assert e.message == "f.yaml: models.bad.context_length: found 0, allowed: whole number >= 1"
    e = wrong({"models": {"bad": {"engine": "x", "tokenzer": "t"}}}, Settings)
    assert e.message.startswith("f.yaml: models.bad.tokenzer: unknown field; allowed: engine, protocol, ")


def test_a_found_value_is_short_and_never_a_secret():
    e = wrong(GOOD | {"max_turns": "x" * 5000})
    assert len(e.message) < 80 + SHOWN + 60 and "…" in e.message
    e = wrong(GOOD | {"agent": {"harness": "x", "env": {"OPENAI_KEY": 123456789}}})
    assert e.message == "f.yaml: agent.env.OPENAI_KEY: found a number, allowed: text without NUL"
    assert wrong(GOOD | {"max_total_tokens": 0}).message.startswith("f.yaml: max_total_tokens: found 0, allowed: ")


def test_an_environment_holds_what_a_process_can_be_given():
    assert convert(GOOD | {"agent": {"harness": "x", "env": {"A": "two\nlines\n"}}}, TaskRequest, "t").agent.env
    assert wrong(GOOD | {"agent": {"harness": "x", "env": {"A": "b\0c"}}}).field == "agent.env.A"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.floats(allow_nan=False, width=16),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["agent", "runtime", "group", "retry", "labels", "artifacts", "num_samples", "evaluator", "metadata", "x"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_whatever_is_wrong_there_is_a_message_and_no_other_error(change):
    try:
        task = convert(GOOD | change, TaskRequest, "t")
    except InvalidTask as e:
        assert e.message.startswith("t: ") and len(e.message) < 2000
        assert not e.field or e.field.split(".")[0].split("[")[0] in {*change, "agent"}
    else:
        assert from_json(to_json(task), TaskRequest).task_id == task.task_id


def test_files(tmp_path):
    good = to_json(TaskRequest(agent=AgentSpec(harness="x"), instruction="go", task_id="t")).decode()
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{good}\n")
    assert len(load_file(tmp_path / "a.jsonl", TaskRequest)) == 2
    (tmp_path / "b.jsonl").write_text(f"{good}\n{{}}\n")
    with pytest.raises(InvalidTask, match=r"b\.jsonl:2: agent: missing"):
        load_file(tmp_path / "b.jsonl", TaskRequest)
    (tmp_path / "c.yaml").write_text(
        "- agent: {harness: x}\n  instruction: a\n- agent: {harness: x}\n  instruction: 3\n"
    )
    with pytest.raises(InvalidTask, match=r"c\.yaml\[1\]: instruction: found 3, allowed: text"):
        load_file(tmp_path / "c.yaml", TaskRequest)
    (tmp_path / "d.txt").write_text("")
    with pytest.raises(InvalidTask, match=r"allowed: \.json, \.jsonl, \.yaml, \.yml"):
        load_file(tmp_path / "d.txt", TaskRequest)
    with pytest.raises(InvalidTask, match="no such file"):
        load_file(tmp_path / "e.json", TaskRequest)
