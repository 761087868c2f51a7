"""SGLang's native contract: POST /generate with token ids, POST /abort_request."""

from __future__ import annotations

from proxy.engines.pool import RETRY_WINDOW, Pool
from proxy.engines.sglang_wire import SGLangWire


class SGLang(Pool):
    def __init__(
        self, urls: str | list[str], context_length: int, api_key: str | None = None, window: float = RETRY_WINDOW
    ):
        super().__init__(SGLangWire(), urls, context_length, api_key, window)
