"""What a harness says of itself in headers and metadata: labels on the completion, and never a route.

All of it comes out of the sandbox: anything may be missing, malformed, huge or a lie. It changes neither which completion a
request continues nor its prompt; whoever reads the labels decides how far to believe them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from polar.completion import Role
from proxy.neutral import Request

LABELS = 12
LENGTH = 128
_JSON = 8192  # longer metadata is not read
_ROLES: tuple[Role, ...] = get_args(Role)

# header -> label, by harness; the first harness that any header of belongs to is it.
_HEADERS: dict[str, dict[str, str]] = {
    "claude_code": {
        "x-claude-code-session-id": "session",
        "x-claude-code-agent-id": "agent",
        "x-claude-code-parent-agent-id": "parent_agent",
    },
    "codex": {
        "x-codex-turn-metadata": "",
        "x-codex-window-id": "window",
        "x-codex-parent-thread-id": "parent_thread",
        "x-openai-subagent": "subagent",
        "session-id": "session",
        "thread-id": "thread",
    },
    "opencode": {"x-session-id": "session", "x-parent-session-id": "parent_session"},
    "pi": {"session_id": "session", "x-session-affinity": "session"},
}
_TURN = {"request_kind": "kind", "thread_source": "source", "thread_id": "thread", "session_id": "session"}


def mark(request: Request, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
    """Fill in `role`, `labels` and `marked_retry` of the request. `headers` have lower-case names."""
    labels: dict[str, str] = {}
    harness = next((h for h, names in _HEADERS.items() if any(n in headers for n in names)), "")
    for name, label in _HEADERS.get(harness, {}).items():
        _put(labels, label, headers.get(name))
    if harness == "codex":
        _codex(labels, headers, body)
    billing = _billing(body)
    if harness in ("", "claude_code"):
        _claude(labels, body, billing)
    if labels and (harness or billing):
        _put(labels, "harness", harness or "claude_code")
    # The official SDKs of OpenAI and Anthropic count their own retries.
    count = headers.get("x-stainless-retry-count", "")
    request.marked_retry = len(count) <= 4 and count.isascii() and count.isdigit() and int(count) > 0
    request.labels = {**request.labels, **dict(sorted(labels.items())[:LABELS])}
    request.role = _role(request, labels, headers, body, billing)


def _role(
    request: Request, labels: dict[str, str], headers: Mapping[str, str], body: Mapping[str, Any], billing: str
) -> Role | None:
    """None: nothing is said; linking makes a guess."""
    own = headers.get("x-polar-role", "").strip().lower()
    if own in _ROLES:
        return own  # type: ignore[return-value]
    if request.role is not None:
        return request.role  # the dialect knows what it was asked for
    if labels.get("kind") == "compaction" or labels.get("subagent") == "compact":
        return "compaction"
    markers = ("agent", "parent_agent", "subagent", "parent_thread", "parent_session")
    if any(labels.get(m) for m in markers) or "cc_is_subagent=true" in billing:
        return "subagent"
    names = {t["function"]["name"] for t in request.tools}
    if "contents" in body and "complete_task" in names and "invoke_agent" not in names:
        return "subagent"  # Gemini CLI marks its subagents by nothing else
    if not names and request.schema is not None:
        return "auxiliary"  # classifiers and loop judges
    if labels.get("harness") and names:
        return "main"
    return None


def _codex(labels: dict[str, str], headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
    said = body.get("client_metadata")
    said = said if isinstance(said, dict) else {}
    for source in (_object(headers.get("x-codex-turn-metadata")), _object(said.get("x-codex-turn-metadata")), said):
        for name, label in _TURN.items():
            if label not in labels:
                _put(labels, label, source.get(name))


def _claude(labels: dict[str, str], body: Mapping[str, Any], billing: str) -> None:
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if "session" not in labels:
        _put(labels, "session", _object(user).get("session_id"))
    if "cc_entrypoint=" in billing:
        _put(labels, "entrypoint", billing.partition("cc_entrypoint=")[2].partition(";")[0])


def _billing(body: Mapping[str, Any]) -> str:
    """Claude Code's accounting line: the first system block."""
    system = body.get("system")
    first = system[0] if isinstance(system, list) and system else system
    text = first.get("text") if isinstance(first, dict) else first
    return text[:1024] if isinstance(text, str) and text.startswith("x-anthropic-billing-header:") else ""


def _object(text: Any) -> dict[str, Any]:
    if not isinstance(text, str) or not 2 <= len(text) <= _JSON:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _put(labels: dict[str, str], label: str, value: Any) -> None:
    if not label or not isinstance(value, str) or len(labels) >= LABELS:
        return
    text = "".join(c for c in value[: 4 * LENGTH] if c.isprintable()).strip()[:LENGTH]
    text = text.encode("utf-8", "replace").decode()
    if text:
        labels[label] = text
