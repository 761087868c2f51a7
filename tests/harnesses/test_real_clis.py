"""Every real CLI through the real proxy and workers, in a sandbox whose network is watched."""

from __future__ import annotations

import pytest

from cli.transcript import entries
from harness_adapters import transcripts
from runtimes import bwrap
from tests.harnesses import network
from tests.harnesses.clis import ALL, OTHERS, Cli
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.report import measure
from tests.harnesses.scenarios import SCENARIOS, Scenario

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]
CASES = [
    pytest.param(cli, s, id=f"{cli.id}-{s.name}")
    for cli in [*ALL, *OTHERS]
    for s in SCENARIOS
    if cli.runs(s.name, s.needs(cli))
]


@pytest.mark.parametrize(("cli", "scenario"), CASES)
def test_scenario(cli: Cli, scenario: Scenario, deployment: Deployment, key: str, report):
    if why := missing(cli.harness):
        pytest.skip(why)
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    watched = not network.available()
    engine = deployment.engine
    engine.policy.scripts[key] = scenario.script(cli, key)
    settings = dict(cli.settings)
    if scenario.name == "compaction":
        settings["context_window"] = cli.window
    task = deployment.task(
        key,
        cli.harness,
        scenario.instruction.replace("KEY", key),
        watched=watched,
        settings=settings,
        artifacts=list(scenario.files),
        **scenario.task(cli),
    )
    result, watch = deployment.run(task, watched=watched)
    captured = deployment.captured(result)
    row = measure(cli, scenario, key, result, captured, engine, watch if watched else None)
    said = deployment.artifact(result, "agent.log")[-3000:].decode("utf-8", "replace")
    joined = transcripts.join(entries(deployment.objects, result), captured)
    row["in_transcript"] = len(captured) - len(joined.missing)
    try:
        assert result.termination == scenario.termination, (row, result.error, said)
        for name, text in scenario.files.items():
            assert deployment.artifact(result, name).decode() == text, row
        assert row["sampled_tokens"] == row["captured_tokens"] == row["accounted_tokens"], row
        assert row["turns"] >= scenario.min_turns and row["chains"] >= scenario.min_chains, row
        if scenario.append_only:
            assert row["continuity"] >= 0.95, row
        if watched:
            assert watch.watched and not watch.error, watch.error
            assert row["foreign_hosts"] == [], row
        # What the agent wrote down of its own can be found, but for side calls and an answer that was cut off.
        kinds = {s.rid: s.decision.kind for s in engine.log}
        unspoken = [c for c in joined.missing if kinds.get(c) == "main"]
        assert len(unspoken) <= (scenario.termination != "finished"), (row, unspoken)
        row["ok"] = True
    finally:
        report(row)
