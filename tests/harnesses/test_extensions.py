"""What a task adds to a CLI reaches the model: MCP servers, skills, text of the system prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.task import McpServer, UploadFile
from runtimes import bwrap
from tests.harnesses.clis import ALL, Cli
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.policy import Script, Turn

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]
SKILL = "---\nname: marble-sorting\ndescription: How to sort marbles by their weight. Use it for marbles.\n---\n\nWeigh them.\n"
SERVER = Path(__file__).with_name("mcp_server.py").read_text()
ABLE = [cli for cli in ALL if cli.harness != "mini_swe_agent"]


@pytest.mark.parametrize("cli", ABLE, ids=lambda cli: cli.id)
def test_what_a_task_adds_reaches_the_model(cli: Cli, deployment: Deployment, key: str):
    if why := missing(cli.harness):
        pytest.skip(why)
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    engine = deployment.engine
    # Several turns: a CLI may hear of a server's tools only after its first request.
    looks = [Turn(f"Look {n}.", (cli.shell("sleep 0.5; ls"),)) for n in range(3)]
    engine.policy.scripts[key] = Script([*looks, Turn("Done.")])
    task = deployment.task(
        key,
        cli.harness,
        f"Go [[run:{key}]].",
        watched=False,
        settings={"system_prompt_append": "Remember the pelican."},
    )
    task.agent.mcp_servers = [McpServer(name="probe", command="python3", args=["/work/tools/mcp_server.py"])]
    task.agent.skills_path = "/work/skills"
    task.runtime.prepare = [
        UploadFile(target="/work/tools/mcp_server.py", content=SERVER),
        UploadFile(target="/work/skills/marble-sorting/SKILL.md", content=SKILL),
    ]
    result, _ = deployment.run(task, watched=False)
    assert result.termination == "finished", (
        result.error,
        result.agent,
        deployment.artifact(result, "agent.log")[-2000:],
    )
    seen = " ".join(f"{c.messages} {c.tools}" for c in deployment.captured(result))
    assert {what for what in ("polar_probe", "marble-sorting", "Remember the pelican.") if what not in seen} == set()
