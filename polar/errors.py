"""Every error Polar raises: one root, a stable code, the stage it came from, and whether a retry can help.

Codes are part of the public contract: they stand in results, ledger lines and HTTP answers. Add, never rename.
"""

from __future__ import annotations


class PolarError(Exception):
    """Root of all errors. `code` is stable; `retryable` says whether a new attempt may succeed."""

    code = "internal"
    retryable = False
    field = ""  # path of the field at fault, where there is one

    def __init__(self, message: str, *, code: str | None = None, stage: str = "", retryable: bool | None = None):
        super().__init__(message)
        self.message = message
        self.stage = stage
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable


class InvalidTask(PolarError):
    """A task, config file or request that can never work. The message names the field, what was found, what is allowed."""

    code = "invalid_task"


class InvalidConfig(PolarError):
    code = "invalid_config"


class NotFound(PolarError):
    code = "not_found"


class Unreadable(PolarError):
    """What the store holds was written by a newer version. Another worker may be able to read it."""

    code = "unreadable"
    retryable = True


class Conflict(PolarError):
    """The thing exists already, or its state forbids the request."""

    code = "conflict"


class Unauthorized(PolarError):
    code = "unauthorized"


class LeaseLost(PolarError):
    """The session went on without this worker: its fence is old. Clean up and write nothing."""

    code = "lease_lost"


class InfraError(PolarError):
    """The machinery failed, not the policy. Never a reward; another attempt may help.

    Codes in use: `runtime_create_failed`, `image_missing` (not retryable), `prepare_failed`, `upload_failed`,
    `exec_failed`, `worker_lost`, `node_lost`, `engine_unavailable`, `proxy_lost`, `no_completions`, `store_unavailable`,
    `artifact_failed`, `reconstruction_failed`, `harness_missing` (not retryable).
    """

    code = "infra_error"
    retryable = True


class EvaluatorError(PolarError):
    """The evaluator could not judge. Codes: `evaluator_error`, `evaluation_timeout`, `tests_crashed`, `no_report`,
    `test_patch_failed`, `wrong_base`, `judge_unavailable`, `bad_judgement`, `state_too_large`, `evaluator_bug` (an exception
    of its own). What goes wrong with its sandbox keeps the codes of InfraError: `image_missing`, `prepare_failed` …"""

    code = "evaluator_error"
    retryable = True


class EngineError(PolarError):
    """The inference engine refused or failed. `status` is the HTTP status it answered, 0 when it could not be reached."""

    code = "engine_unavailable"
    retryable = True

    def __init__(self, message: str, *, status: int = 0, **kw):
        super().__init__(message, **kw)
        self.status = status


class UnsupportedSpec(InvalidTask):
    """A runtime or harness was asked for something it can't do. Refused at submit, never ignored."""

    code = "unsupported_spec"
