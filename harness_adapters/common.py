"""What adapters share: strict settings, refusals, the endpoint under the names that clients know."""

from __future__ import annotations

import difflib
from typing import TypeVar

from msgspec import structs

from polar.codec import convert
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, Outcome
from polar.task import AgentSpec

T = TypeVar("T")


def read_settings(agent: AgentSpec, typ: type[T], harness: str) -> T:
    """`agent.settings` as `typ`, a struct that forbids unknown fields. Raises InvalidTask naming the setting."""
    allowed = [f.encode_name for f in structs.fields(typ)]  # type: ignore[arg-type]
    for key in agent.settings:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, 1)
            meant = f"; did you mean '{close[0]}'?" if close else ""
            has = f"allowed: {', '.join(allowed)}" if allowed else "it has none"
            raise InvalidTask(f"agent.settings.{key}: unknown to the '{harness}' harness; {has}{meant}")
    try:
        return convert(agent.settings, typ, "agent.settings")
    except InvalidTask as e:
        raise InvalidTask(e.message.replace("agent.settings: ", "agent.settings.", 1)) from e


def refuse_mcp(agent: AgentSpec, harness: str) -> None:
    if agent.mcp_servers:
        raise UnsupportedSpec(f"agent.mcp_servers: the '{harness}' harness can't use MCP servers")


def refuse_skills(agent: AgentSpec, harness: str) -> None:
    if agent.skills_path is not None:
        raise UnsupportedSpec(f"agent.skills_path: the '{harness}' harness can't use skills")


def refuse_extensions(agent: AgentSpec, harness: str) -> None:
    """For agents that know neither MCP servers nor skills."""
    refuse_mcp(agent, harness)
    refuse_skills(agent, harness)


def openai_env(endpoint: Endpoint) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{endpoint.base_url}/v1", "OPENAI_API_KEY": endpoint.api_key}


def every_env(endpoint: Endpoint) -> dict[str, str]:
    """The endpoint for all clients that read their environment."""
    return {
        **openai_env(endpoint),
        "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "GOOGLE_GEMINI_BASE_URL": endpoint.base_url,
        "GEMINI_API_KEY": endpoint.api_key,
        "GEMINI_MODEL": endpoint.model,
    }


def by_exit_code(exit_code: int | None, output: str) -> Outcome:
    """Exit 0 is `finished`; all else, and no code (the agent was killed), is `agent_error`."""
    if exit_code == 0:
        return Outcome(termination="finished")
    if exit_code is None:
        return Outcome(termination="agent_error", message="the agent was killed")
    return Outcome(termination="agent_error", message=f"exit code {exit_code}: {last_lines(output)}")


def last_lines(output: str, limit: int = 400) -> str:
    text = output.strip()
    return text[-limit:] if text else "no output"
