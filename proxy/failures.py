"""What can go wrong with a call, told apart by what the harness should do; each dialect puts it in its own envelope."""

from __future__ import annotations

from polar.errors import PolarError

# kind -> HTTP status. Dialects may answer another status where their clients need it.
KINDS = {
    "bad_request": 400,
    "context_overflow": 400,
    "unauthorized": 401,
    "limit": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "gone": 410,
    "too_large": 413,
    "upgrade_refused": 426,
    "internal": 500,
    "unavailable": 503,
}


class CallError(PolarError):
    """A call that can't be answered. `code` is stable, `param` the offending field, `retry_after` seconds or 0; an overflow
    has `tokens`: those of the prompt, and the most that fit."""

    tokens: tuple[int, int] | None = None

    def __init__(self, kind: str, message: str, *, code: str = "", param: str | None = None, retry_after: int = 0):
        super().__init__(message, code=code or kind, retryable=kind == "unavailable")
        self.kind = kind
        self.param = param
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        return KINDS[self.kind]


def bad(message: str, param: str | None = None, code: str = "invalid_request") -> CallError:
    return CallError("bad_request", message, param=param, code=code)


def unavailable(message: str, code: str = "unavailable", retry_after: int = 2) -> CallError:
    return CallError("unavailable", message, code=code, retry_after=retry_after)


def gone(message: str = "this session has ended") -> CallError:
    return CallError("gone", message, code="session_ended")


def unknown_capability() -> CallError:
    return CallError("unauthorized", "unknown session or API key", code="invalid_api_key")


def overflow(prompt: int, context: int) -> CallError:
    # Harnesses recognise an overflow by these words and start their compaction.
    error = CallError(
        "context_overflow",
        f"This model's maximum context length is {context} tokens, but the prompt has {prompt} tokens: prompt is too long",
        code="context_length_exceeded",
        param="messages",
    )
    error.tokens = (prompt, context)
    return error
