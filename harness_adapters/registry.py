"""The adapter that an agent spec asks for."""

from __future__ import annotations

from polar import plugins
from polar.errors import InvalidTask
from polar.launch import HarnessAdapter
from polar.task import AgentSpec

_PARTS = ("name", "dialects", "check", "plan", "outcome")


def load_adapter(agent: AgentSpec) -> HarnessAdapter:
    """An instance of the registered harness, or of the class at `import_path`. Raises InvalidTask."""
    what = "agent.harness" if agent.harness else "agent.import_path"
    name = agent.harness or agent.import_path or ""
    found = plugins.load(plugins.HARNESSES, name, what)
    try:
        adapter = found() if isinstance(found, type) else found
    except TypeError as e:
        raise InvalidTask(f"{what}: '{name}' can't be made without arguments: {e}") from e
    missing = [part for part in _PARTS if not hasattr(adapter, part)]
    if missing:
        raise InvalidTask(f"{what}: '{name}' is no harness adapter; it lacks {', '.join(missing)}")
    return adapter
