"""Every real CLI through the real proxy and workers, in a sandbox whose network is watched."""

from __future__ import annotations

import pytest

from cli.transcript import entries
from harness_adapters import transcripts
from runtimes import bwrap
from tests.harnesses import network
from tests.harnesses.clis import ALL, OTHERS, Cli
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.running import check, finish, pairs, script
from tests.harnesses.scenarios import Scenario

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]
CASES = [pytest.param(cli, s, id=f"{cli.id}-{s.name}") for cli, s in pairs([*ALL, *OTHERS])]


@pytest.mark.parametrize(("cli", "scenario"), CASES)
def test_scenario(cli: Cli, scenario: Scenario, deployment: Deployment, key: str, report):
    if why := missing(cli.harness):
        pytest.skip(why)
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    watched = not network.available()
    task = deployment.task(**script(cli, scenario, deployment, key), watched=watched)
    run, watch = finish(cli, scenario, key, deployment, task, watched)
    joined = transcripts.join(entries(deployment.objects, run.result), run.captured)
    run.row["in_transcript"] = len(run.captured) - len(joined.missing)
    try:
        check(run)
        if watched:
            # No command of the CLI begins before its network is watched; whether they share one is the back-end's affair.
            assert watch.networks and not watch.error, watch.error
            assert run.row["foreign_hosts"] == [], run.row
        # What the agent wrote down of its own can be found, but for side calls and an answer that was cut off.
        unspoken = [c for c in joined.missing if run.kind(c) == "main"]
        assert len(unspoken) <= (scenario.termination != "finished"), (run.row, unspoken)
        run.row["ok"] = True
    finally:
        report(run.row)
