"""The page's own example of a harness: it is what docs/harnesses.md shows, and it runs."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from harness_adapters.registry import load_adapter
from polar import plugins
from polar.config import Settings
from polar.errors import InvalidTask
from polar.launch import Endpoint, HarnessAdapter
from polar.task import AgentSpec, RuntimeSpec
from runtimes.local import LocalRuntime

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
ENDPOINT = Endpoint(base_url="http://127.0.0.1:1/s/cap", api_key="cap", model="policy")
AGENT = '#!/bin/sh\nprintf "%s|%s|%s\\n" "$*" "$OPENAI_BASE_URL" "$MODEL" | tee "$HOME/my-agent.log"; cat "$4"\n'


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if b.startswith("# my_agent.py")]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 32, "the page promises about thirty lines"
    (tmp_path / "my_agent.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_agent"
    sys.modules.pop("my_agent", None)
    plugins.load.cache_clear()
    plugins.names.cache_clear()


def test_by_import_path_it_runs(module, tmp_path):
    spec = AgentSpec(import_path=f"{module}:MyAgent", settings={"steps": 3})
    adapter = load_adapter(spec)
    assert isinstance(adapter, HarnessAdapter)
    adapter.check(spec)
    plan = adapter.plan(spec, "Do 'this'.\n", ENDPOINT)
    box = LocalRuntime(Settings(data_dir=str(tmp_path / "data"))).create(
        RuntimeSpec(options={"isolation": "none"}), labels={}, proxy=None, timeout=30
    )
    try:
        box.write("my-agent", AGENT.encode(), mode=0o755)
        for f in plan.files:
            box.write(f.path, f.content.encode(), mode=f.mode)
        result = box.exec(plan.argv, env={**plan.env, "PATH": f"{box.ref.workdir}:/usr/bin:/bin"}, timeout=30)
        said = result.output.decode()
        assert adapter.outcome(result.exit_code, said).termination == "finished", said
        assert re.fullmatch(r"--steps 3 --task \S+/task.txt\|http://127.0.0.1:1/s/cap/v1\|policy\nDo 'this'.\n", said)
        assert not box.download(plan.artifacts[0], tmp_path / "log", limit=1 << 20)
    finally:
        box.destroy()


def test_by_entry_point(module, monkeypatch):
    entry = EntryPoint(name="my_agent", value="my_agent:MyAgent", group=plugins.HARNESSES)
    real = plugins.entry_points
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [*real(group=group), *([entry] if group == entry.group else [])]
    )
    plugins.load.cache_clear()
    plugins.names.cache_clear()
    adapter = load_adapter(AgentSpec(harness="my_agent"))
    assert adapter.name == "my_agent" and "my_agent" in plugins.names(plugins.HARNESSES)
    with pytest.raises(InvalidTask, match=r"agent\.settings\.stepz: unknown to 'my_agent'; allowed: steps"):
        adapter.check(AgentSpec(harness="my_agent", settings={"stepz": 1}))
