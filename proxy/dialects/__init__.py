"""Provider dialects: one file each, one line here each."""

from proxy.dialects.base import Dialect
from proxy.dialects.openai_chat import OpenAIChat

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(),)
# Speaks where no dialect's path matched.
FALLBACK: Dialect = DIALECTS[0]
