"""What is said of a run whose adapter is given only the end of its output."""

from __future__ import annotations

import json

import pytest

from harness_adapters.events import TAIL, cut_off
from harness_adapters.registry import load_adapter
from polar.launch import Outcome
from polar.task import AgentSpec
from workers.run import OUTPUT_LIMIT


def outcome(name: str, code: int | None, output: str) -> Outcome:
    """As RUN asks for it."""
    tail = output.encode()[-OUTPUT_LIMIT:].decode("utf-8", "replace")
    return load_adapter(AgentSpec(harness=name)).outcome(code, tail)


def lines(*events: dict | str) -> str:
    return "".join(f"{e if isinstance(e, str) else json.dumps(e, separators=(',', ':'))}\n" for e in events)


def test_what_is_the_end_of_more():
    assert TAIL == OUTPUT_LIMIT
    assert cut_off("x" * TAIL) and not cut_off("x" * (TAIL - 1))
    # The cut may be in the middle of a character.
    for extra in range(4):
        assert cut_off(("\U0001f600" * TAIL + "x" * extra).encode()[-TAIL:].decode("utf-8", "replace"))


# -- pi: its last event but one repeats every message of the run


def answer(reason: str, **more) -> dict:
    said = [{"type": "text", "text": 'As in {"role":"assistant","stopReason":"error"}],"willRetry":false}'}]
    return {"role": "assistant", "content": said, "usage": {"input": 4}, "stopReason": reason, "timestamp": 1, **more}


def long_run(last: dict, pages: int = 60, page: str = 'maximum context length "so it says"\n' * 800) -> str:
    tool = {"role": "toolResult", "content": [{"type": "text", "text": page}], "isError": False}
    turns = [{"type": "turn_end", "message": m} for m in [*[answer("toolUse")] * pages, last]]
    end = {"type": "agent_end", "messages": [*[answer("toolUse"), tool] * pages, last], "willRetry": False}
    return lines({"type": "session", "id": "s"}, *turns, end, {"type": "agent_settled", "aborted": False})


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_long_run_of_pi_is_judged_by_its_last_answer(reason):
    output = long_run(answer(reason))
    assert len(output) > 1.5 * TAIL
    found = outcome("pi", 0, output)
    # What it counted is unknown, and no 0.
    assert (found.termination, found.notes) == ("finished", {"stop_reason": reason, "partial": True})


def test_a_long_run_of_pi_that_failed():
    failed = outcome("pi", 0, long_run(answer("error", errorMessage="503 away")))
    assert (failed.termination, failed.message, failed.notes["partial"]) == ("agent_error", "503 away", True)
    # What tools printed is all over what is kept, and no word of the CLI.
    tool = {"role": "toolResult", "content": []}
    for code, last in ((0, answer("toolUse")), (0, tool), (1, answer("stop")), (1, tool)):
        assert outcome("pi", code, long_run(last)).termination == "agent_error"
    full = outcome("pi", 0, long_run(answer("error", errorMessage="400: maximum context length is 9 tokens")))
    assert full.termination == "context_overflow"
    assert outcome("pi", None, long_run(answer("stop"))).termination == "agent_error"
    killed_as_it_wrote = long_run(answer("stop"))[: -len(lines({"type": "agent_settled", "aborted": False})) - 30]
    assert outcome("pi", 0, killed_as_it_wrote).termination == "agent_error"


def test_every_place_to_cut_a_run_of_pi():
    """From an output that is whole, over a last turn that is cut off, to a last event that is."""
    begun = {"partial": True, "stop_reason": "stop"}
    spare = TAIL - len(long_run(answer("stop"), pages=1, page=""))
    seen = set()
    for more in range(-100, 1500, 61):
        found = outcome("pi", 0, long_run(answer("stop"), pages=1, page="x" * (spare + more)))
        assert found.termination == "finished" and found.notes["stop_reason"] == "stop"
        seen.add(found.notes.get("turns"))
    assert seen == {2, 1, None} and found.notes == begun
    later = outcome("pi", 0, long_run(answer("stop")) + lines({"type": "turn_end", "message": answer("error")}))
    assert later.termination == "agent_error" and later.notes["turns"] == 1  # the turn after it counts


# -- what a tool printed


@pytest.mark.parametrize("size", [25_000, 2 * TAIL])
def test_a_cut_event_is_no_word_of_the_cli(size):
    printed = {
        "type": "command_execution",
        "status": "failed",
        "aggregated_output": "maximum context length " * (size // 23),
    }
    output = lines({"type": "thread.started"}, {"type": "item.completed", "item": printed})
    assert outcome("codex", 1, output).termination == "agent_error"
    assert outcome("codex", 1, output + "Error: disk full\n").termination == "agent_error"
    assert outcome("codex", 1, output + "Error: context_length_exceeded\n").termination == "context_overflow"
    before = lines("Error: context_length_exceeded", {"type": "turn.started"} | {"pad": "x" * 25_000})
    assert outcome("codex", 1, before).termination == "context_overflow"  # however long an event comes after it


def test_zeros_of_a_part_are_not_told():
    call = {"type": "item.completed", "item": {"type": "command_execution", "status": "completed"}}
    done = {"type": "turn.completed", "usage": {"input_tokens": 9}}
    short = outcome("codex", 0, lines({"type": "thread.started", "thread_id": "t"}, call, done))
    assert short.notes["tool_errors"] == 0 and "partial" not in short.notes
    long = outcome("codex", 0, lines({"type": "thread.started", "thread_id": "t", "x": "x" * TAIL}, call, done))
    assert long.notes == {"tool_calls": 1, "usage": {"prompt_tokens": 9}, "partial": True}
    nothing = outcome("codex", 0, lines("x" * TAIL))
    assert nothing.message == "exit code 0 without a final answer in the last MiB of its output"


def test_mini_submits_more_than_is_kept():
    said = "mini-swe-agent (step 12, $0.00):\nDone.\n\nExit:\n" + "a line of the patch\n" * 80_000
    long = outcome("mini_swe_agent", 0, f"{said}\nSaved trajectory to '/home/agent/.polar/mini.traj.json'\n")
    assert (long.termination, long.notes) == ("finished", {"partial": True})
    assert outcome("mini_swe_agent", 0, said).termination == "agent_error"
    assert outcome("mini_swe_agent", 0, "Saved trajectory to 'x'\n").termination == "agent_error"
