"""What a harness says of itself in headers and metadata: labels on the completion, and never a route."""

from __future__ import annotations

from typing import Any

from proxy.neutral import Request


def mark(request: Request, headers: dict[str, str], body: dict[str, Any]) -> None:
    """Fill in `role`, `labels` and `marked_retry` of the request. `headers` have lower-case names; nothing is trusted to
    be well-formed."""
    # The official SDKs of OpenAI and Anthropic count their own retries.
    request.marked_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
