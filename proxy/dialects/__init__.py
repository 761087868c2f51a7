"""Provider dialects: one file each, one line here each."""

from proxy.dialects.anthropic import Anthropic
from proxy.dialects.base import Dialect
from proxy.dialects.google import Google
from proxy.dialects.openai_chat import OpenAIChat
from proxy.dialects.responses import OpenAIResponses

# The first that matches a path speaks; OpenAI's stands last, for it shares paths with others that are told by a mark.
DIALECTS: tuple[Dialect, ...] = (
    Anthropic(),
    Google(),
    OpenAIResponses(),
    OpenAIChat(),
)
# Speaks where no dialect's path matched.
FALLBACK: Dialect = DIALECTS[-1]
