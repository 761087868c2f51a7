"""What adapters share: strict settings, refusals, the endpoint under the names that clients know."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from msgspec import structs

from polar.codec import convert
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, Outcome
from polar.task import AgentSpec

T = TypeVar("T")
# For a check before there is a session: a plan finds all that is wrong with a spec but what the model's window decides.
ANY_ENDPOINT = Endpoint(base_url="http://any", api_key="any", model="any", context_length=1 << 53)


def read_settings(agent: AgentSpec, typ: type[T], harness: str) -> T:
    """`agent.settings` as `typ`, a struct that forbids unknown fields. Raises InvalidTask naming the setting."""
    allowed = [f.encode_name for f in structs.fields(typ)]  # type: ignore[arg-type]
    for key in agent.settings:
        if key not in allowed:
            check_text(key, "agent.settings")
            close = difflib.get_close_matches(key, allowed, 1)
            meant = f"; did you mean '{close[0]}'?" if close else ""
            has = f"allowed: {', '.join(allowed)}" if allowed else "it has none"
            raise InvalidTask(f"agent.settings.{key[:80]}: unknown to the '{harness}' harness; {has}{meant}")
    try:
        settings = convert(agent.settings, typ, "agent.settings")
    except InvalidTask as e:
        raise InvalidTask(e.message.replace("agent.settings: ", "agent.settings.", 1)) from e
    check_text(agent.settings, "agent.settings")
    return settings


def check_text(value: Any, where: str) -> None:
    """Raises InvalidTask for a text in `value` that neither a command nor a file could carry."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_text(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_text(inner, f"{where}[{i}]")
    elif isinstance(value, str):
        if "\0" in value:
            raise InvalidTask(f"{where}: found a NUL character, allowed is text without one")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise InvalidTask(f"{where}: is no valid Unicode text: {e.reason}") from e


def refuse_extensions(agent: AgentSpec, harness: str) -> None:
    """For agents that know neither MCP servers nor skills."""
    if agent.mcp_servers:
        raise UnsupportedSpec(f"agent.mcp_servers: the '{harness}' harness can't use MCP servers")
    if agent.skills_path is not None:
        raise UnsupportedSpec(f"agent.skills_path: the '{harness}' harness can't use skills")


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


def writable(text: str) -> str:
    """`text` without halves of characters, which JSON may hold and no file or message can."""
    return text.encode("utf-8", "replace").decode()


def ended_by_itself(exit_code: int | None) -> bool:
    """Neither killed nor ended by a signal, which the agent's own commands can send: else its output has no last word."""
    return exit_code is not None and 0 <= exit_code < 128
