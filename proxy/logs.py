"""Structured logs: one JSON object a line on stderr.

Prompts, answers, capabilities and keys are never given to a logger, and of an exception only its type and place are
written: its message may quote what it failed on. `prompts` is the one logger for conversations, silent unless asked for.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from typing import Any

import msgspec

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


prompts = logging.getLogger("polar.proxy.prompts")
prompts.setLevel(logging.CRITICAL)


class _Json(logging.Formatter):
    def __init__(self, messages: bool = False):
        super().__init__()
        self._messages = messages  # of exceptions

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            line["exception"] = kind.__name__
            line["trace"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(trace)]
            if self._messages:
                line["exception"] += f": {error}"
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(level: str = "INFO", log_prompts: bool = False) -> None:
    """`log_prompts` writes conversations and the messages of exceptions, whatever the level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(log_prompts))
    prompts.setLevel(logging.INFO if log_prompts else logging.CRITICAL)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("transformers", "httpx", "asyncio", "renderers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
