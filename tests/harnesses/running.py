"""One run of a CLI through a scenario, and what must be true of it whatever it runs in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from harness_adapters.versions import versions
from polar.completion import Completion
from polar.result import SessionResult
from polar.task import TaskRequest
from tests.harnesses.clis import Cli
from tests.harnesses.deployment import Deployment
from tests.harnesses.network import Watch
from tests.harnesses.report import measure
from tests.harnesses.scenarios import Scenario

# What a CLI's own output tells of these three. Of the others a note would be a guess, a 0 most of all.
TOLD: dict[str, set[str]] = {
    "claude_code": {"turns", "tool_calls", "tool_errors"},
    "codex": {"tool_calls", "tool_errors"},
    "gemini_cli": {"tool_calls"},
    "qwen_code": {"turns", "tool_calls", "tool_errors"},
    "opencode": {"turns", "tool_calls", "tool_errors"},
    "pi": {"turns", "tool_calls", "tool_errors"},
    "mini_swe_agent": {"turns", "tool_calls", "tool_errors"},
    "mini_swe_agent-openai_responses": {"tool_calls", "tool_errors"},  # it prints no steps there
}


def script(cli: Cli, scenario: Scenario, deployment: Deployment, key: str) -> dict[str, Any]:
    """Teaches the policy its part; returns what of the task doesn't depend on its sandbox."""
    deployment.engine.policy.scripts[key] = scenario.script(cli, key)
    return {
        "task_id": key,
        "harness": cli.harness,
        "instruction": scenario.instruction.replace("KEY", key),
        "settings": cli.settings | scenario.settings(cli),
        "artifacts": list(scenario.files),
        "model": scenario.model,
        **scenario.task(cli),
    }


@dataclass
class Run:
    """A session that is over. `row` is its line of the report."""

    cli: Cli
    scenario: Scenario
    key: str
    deployment: Deployment
    result: SessionResult
    captured: list[Completion]
    row: dict[str, Any]

    @property
    def said(self) -> str:
        """The end of what the CLI wrote."""
        return self.deployment.artifact(self.result, "agent.log")[-3000:].decode("utf-8", "replace")

    def kind(self, completion_id: str) -> str:
        """What the policy took a call for: main, task, compaction, other."""
        return self.deployment.engine.kinds.get(completion_id, "")


def finish(
    cli: Cli, scenario: Scenario, key: str, deployment: Deployment, task: TaskRequest, watched: bool
) -> tuple[Run, Watch]:
    result, watch = deployment.run(task, watched=watched)
    captured = deployment.captured(result)
    row = measure(cli, scenario, key, result, captured, deployment.engine, watch if watched else None)
    return Run(cli, scenario, key, deployment, result, captured, row), watch


def check(run: Run) -> None:
    """Whatever the CLI, the back-end and the scenario."""
    row, scenario, result, captured = run.row, run.scenario, run.result, run.captured
    assert result.termination == scenario.termination, (row, result.error, run.said)
    code = result.agent["exit_code"]
    right = {"agent_timeout": code is None, "context_overflow": code not in (0, None)}
    assert right.get(scenario.termination, code == scenario.exit_code), (code, row)
    assert row["notes"].get("version") == versions().harnesses[run.cli.harness].version, row
    _check_notes(run)
    for name, text in scenario.files.items():
        assert run.deployment.artifact(result, name).decode() == text, row
    # Every sampled token is there, and in a trace unless a reason is given.
    assert row["sampled_tokens"] == row["captured_tokens"] == row["accounted_tokens"], row
    assert row["turns"] >= scenario.min_turns and row["chains"] >= scenario.min_chains, row
    assert "" not in row["breaks"], f"a break without a reason: {row}"
    if scenario.append_only:
        assert row["continuity"] >= 0.95, row
    # What the commands printed came back to the model: all of several at once, too, and a failed one's words.
    heard = json.dumps([c.messages for c in captured], ensure_ascii=False)
    assert not (lost := [s for s in scenario.heard if s not in heard]), (lost, row)
    said = json.dumps([c.response for c in captured], ensure_ascii=False)
    assert not (lost := [s for s in scenario.said if s not in said]), (lost, row)
    # A subagent's turns are no part of the conversation that started it.
    for trace in result.trajectory.traces:
        kinds = {run.kind(s.completion_id) for s in trace.segments}
        assert not {"main", "task"} <= kinds, (row, kinds)
    seen = {run.kind(c.completion_id) for c in captured}
    assert scenario.kinds <= seen, (row, seen)
    if scenario.termination == "agent_timeout":
        assert [c.finish_reason for c in captured][-1] == "abort", row  # in the middle of it
    if scenario.outage:
        assert run.deployment.engine.outages(run.key) == 1 and row["seconds"] >= scenario.outage, row


def _check_notes(run: Run) -> None:
    """The CLI's own counts: all that it tells, and right where the script alone decides them."""
    notes, told = run.row["notes"], TOLD.get(run.cli.id, TOLD[run.cli.harness])
    assert run.scenario.notes(notes), run.row
    if run.scenario.termination == "finished" and "partial" not in notes:
        assert notes.keys() & set().union(*TOLD.values()) == told, run.row
    if run.scenario.name == "multi_turn":
        calls = sum(len(t.calls) for t in run.scenario.script(run.cli, run.key).turns)
        counts = {
            "turns": run.row["turns"],
            "tool_calls": calls,
            "tool_errors": 1,
        }  # of one command, which exits with 3
        assert {k: notes[k] for k in told} == {k: counts[k] for k in told}, run.row
