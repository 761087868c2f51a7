"""Whatever an adapter makes of the agent's output, a result can hold it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polar.codec import pack
from polar.launch import Outcome
from polar.sandbox import ExecResult
from workers.outcome import MESSAGE_LIMIT, NOTES_LIMIT, read


def ran(exit_code: int | None, said) -> Outcome:
    def outcome(code, output):
        if isinstance(said, Exception):
            raise said
        return said

    adapter = SimpleNamespace(name="theirs", outcome=outcome)
    result = ExecResult(exit_code=exit_code, output=b"the end", output_bytes=7, seconds=1.0)
    return read(adapter, result)  # type: ignore[arg-type]


@pytest.mark.parametrize(("exit_code", "termination"), [(0, "finished"), (3, "agent_error"), (None, "agent_error")])
def test_an_adapter_that_fails_leaves_it_to_the_exit_code(exit_code, termination):
    said = ran(exit_code, KeyError("usage"))
    assert said.termination == termination
    assert said.notes == {"adapter": "failed on the agent's output: KeyError"}


def test_a_word_that_is_no_termination_is_not_taken():
    assert ran(0, Outcome(termination="passed", notes={"reward": 1})).notes["adapter"].endswith("ValueError")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "notes",
    [{"x": "y" * NOTES_LIMIT}, {"x": "\ud800"}, {"x": 1 << 80}, {"x": object()}],
    ids=["long", "half", "big", "no"],
)
def test_notes_that_cant_be_stored_are_left_out(notes):
    said = ran(1, Outcome(termination="turn_limit", message="m", notes=notes))
    assert said.termination == "turn_limit" and said.message == "m"
    assert list(said.notes) == ["adapter"] and said.notes["adapter"].startswith("notes left out: ")


def test_a_message_is_bounded_and_storable():
    said = ran(1, Outcome(termination="agent_error", message="\ud800" * 10_000, notes={"turns": 3}))
    assert len(said.message) == MESSAGE_LIMIT and pack(said) and said.notes == {"turns": 3}
