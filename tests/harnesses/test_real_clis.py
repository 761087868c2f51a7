"""Every real CLI through the real proxy and workers, in a sandbox whose network is watched."""

from __future__ import annotations

import pytest

from cli.transcript import entries
from harness_adapters import transcripts
from runtimes import bwrap
from tests.harnesses import network
from tests.harnesses.cases import LOCAL, Case
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.report import reported
from tests.harnesses.running import check, finish, script

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in LOCAL])
def test_scenario(case: Case, deployment: Deployment, key: str, report):
    cli, scenario, _ = case
    if why := missing(cli.harness):
        pytest.skip(why)
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    watched = not network.available()
    task = deployment.task(**script(cli, scenario, deployment, key), watched=watched)
    with reported(case, report) as row:
        run, watch = finish(cli, scenario, key, deployment, task, watched)
        row |= run.row
        joined = transcripts.join(entries(deployment.objects, run.result), run.captured)
        row["in_transcript"] = len(run.captured) - len(joined.missing)
        check(run)
        if watched:
            # No command of the CLI begins before its network is watched; whether they share one is the back-end's affair.
            assert watch.networks and not watch.error, watch.error
            assert row["foreign_hosts"] == [], row
        # What the agent wrote down of its own can be found, but for side calls and an answer that was cut off.
        unspoken = [c for c in joined.missing if run.kind(c) == "main"]
        assert len(unspoken) <= (scenario.termination != "finished"), (row, unspoken)
