"""Messages to token ids and back, for one row of the model table, through the `renderers` library.

Two copies of the tokenizer are held: one belongs to the rendering thread (long prompts must not block the loop), the other
to the loop, which decodes and parses what is sampled. The fast tokenizers are not safe to share between the two.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from polar import arrays
from polar.config import Model
from polar.errors import InvalidConfig
from proxy.bridge import TemplateBridge
from proxy.failures import bad
from proxy.guard import Guard, GuardedTokenizer
from proxy.neutral import Message
from proxy.quick import quick

T = TypeVar("T")
log = logging.getLogger("polar.proxy")

# Renderers whose structure is delimited by single tokens, so that sampled text can be streamed before the final parse.
# Any other renderer's answers are sent when they are complete.
_STREAMABLE = {"default", "qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"}
# Statuses of a parsed block that name a call: `invalid_json` with a name is a parameter that is a bare string.
_USABLE = {"ok", "invalid_json", "unknown_tool"}
# Up to so many characters of new messages, rendering on the loop is quicker than a change of threads.
_INLINE = 8192
# The reasoning channel of a prompt is decided by its last turn's opening.
PROMPT_TAIL = 256


class ParsedCall(Struct, frozen=True):
    """A call found in a sample; `id` is the model's own where its format has one."""

    name: str
    arguments: str
    id: str = ""


class Attempt(Struct, frozen=True):
    """A block that looks like a tool call: its text, and the call unless it is malformed."""

    text: str
    call: ParsedCall | None


class Parsed(Struct, frozen=True):
    """A sample taken apart. With `open_block` the last attempt was not closed by the sample. `reasoning_closed`: nothing
    that follows can become reasoning."""

    reasoning: str
    content: str
    attempts: list[Attempt]
    reasoning_open: bool
    reasoning_closed: bool
    open_block: bool


class Codec:
    def __init__(self, name: str, row: Model):
        where = f"models.{name}"
        tokenizer = _load_tokenizer(where, row.tokenizer)
        self._tokenizer = quick(copy.deepcopy(tokenizer))
        self._render = _renderer(where, row, GuardedTokenizer(quick(tokenizer)))
        self._parse = _renderer(where, row, GuardedTokenizer(self._tokenizer))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"render-{name}")
        self.stop_ids: frozenset[int] = frozenset(self._render.get_stop_token_ids())
        if not self.stop_ids:
            raise InvalidConfig(f"{where}.tokenizer: '{row.tokenizer}' has no end-of-turn token")
        self.guard = Guard(self._tokenizer, self.stop_ids)
        added = self._tokenizer.get_added_vocab()
        # Some vocabularies hold runs of white space as added tokens: ordinary text.
        words = {word: i for word, i in added.items() if word.strip()}
        self.structural_ids = frozenset(words.values()) | self.stop_ids
        self.markers = frozenset(words) | {"<think>", "</think>", "<tool_call>", "</tool_call>"}
        self.marker = re.compile("|".join(re.escape(w) for w in sorted(self.markers, key=len, reverse=True)))
        self.marker_heads = frozenset(m[:n] for m in self.markers for n in range(1, len(m)))
        self.longest_head = max(map(len, self.marker_heads), default=0)
        self.streamable = self._render.config.name in _STREAMABLE
        self._think_end = added.get("</think>")
        self.bridge: TemplateBridge | None = None
        self.unbridged = ""  # why a template has no bridge
        if row.renderer == "template":
            self.bridge, self.unbridged = TemplateBridge.proven(self._render, self.stop_ids)
            if self.bridge is None:
                log.warning("no bridge: every prompt is rendered in full", extra={"model": name, "why": self.unbridged})
        self._late_system = _late_system(self._render)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def render(self, messages: list[Message], tools: list[Any]) -> np.ndarray:
        """The whole conversation with an opened assistant turn, int32 (n,). CallError if the template refuses it."""
        return await self._in_thread(lambda: self._full(messages, tools))

    def _full(self, messages: list[Message], tools: list[Any]) -> np.ndarray:
        try:
            ids = self._render.render_ids(
                self._prepare(messages), tools=self.guard.tools(tools) or None, add_generation_prompt=True
            )
        except Exception as e:  # templates raise whatever they like
            raise bad(
                f"the model's chat template refuses these messages: {' '.join(str(e).split())[:300]}", "messages"
            ) from e
        return arrays.ids(ids)

    async def extend(
        self, prompt: np.ndarray, sampled: np.ndarray, response: Message, new: list[Message], tools: list[Any]
    ) -> np.ndarray | None:
        """prompt + sampled, closed, then the new messages and an opened assistant turn; None if that can't be proven."""
        return (await self.extended(prompt, sampled, response, new, tools))[0]

    async def extended(
        self, prompt: np.ndarray, sampled: np.ndarray, response: Message, new: list[Message], tools: list[Any]
    ) -> tuple[np.ndarray | None, str]:
        """As extend(), with the reason for a None."""
        size = sum(len(m["content"]) for m in new) + (0 if self.bridge is not None else len(prompt))
        if size <= _INLINE:
            return self._extended(self._parse, prompt, sampled, response, new, tools)
        return await self._in_thread(lambda: self._extended(self._render, prompt, sampled, response, new, tools))

    def _extended(
        self,
        renderer: Any,
        prompt: np.ndarray,
        sampled: np.ndarray,
        response: Message,
        new: list[Message],
        tools: list[Any],
    ) -> tuple[np.ndarray | None, str]:
        try:
            new = self._prepare(new, late=True)
            if self.bridge is not None:
                (response,) = self.guard.messages([response])
        except RecursionError:  # calls nested too deeply to look for markers in them
            return None, "the turn is nested too deeply"
        if self.bridge is not None:
            return self.bridge.extend(renderer, prompt, sampled, response, new)
        if self.unbridged:
            return None, f"the template has no bridge: {self.unbridged}"
        try:
            out = renderer.bridge_to_next_turn(
                prompt.tolist(), sampled.tolist(), new, tools=self.guard.tools(tools) or None
            )
        except Exception as e:  # a bridge that can't is the same as none
            return None, f"the renderer's bridge failed: {type(e).__name__}"
        if out is None:
            return None, "the renderer renders this turn anew"
        ids = arrays.ids(out.token_ids)
        n = len(prompt) + len(sampled)
        # A bridge may add a closing token behind the sample, never take back what was sampled.
        if not np.array_equal(ids[: len(prompt)], prompt) or not np.array_equal(ids[len(prompt) : n], sampled):
            return None, "the renderer's bridge changes what was sampled"
        return ids, ""

    def _prepare(self, messages: list[Message], late: bool = False) -> list[Message]:
        """Messages as the template gets them: their markers cut, and system messages that it would refuse or drop made
        the user's. `late`: they go on behind others."""
        head, rest = ([], messages) if late else (messages[:1], messages[1:])
        if not self._late_system and any(m["role"] == "system" for m in rest):
            messages = head + [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
        return self.guard.messages(messages)

    def parse(self, ids: list[int], prompt_tail: list[int], tools: list[Any]) -> Parsed:
        """Take a sample apart. `prompt_tail` is the end of its prompt (PROMPT_TAIL ids)."""
        r = self._parse.parse_response(ids, tools=tools or None, prompt_ids=prompt_tail)
        kept = next((i for i, t in enumerate(ids) if t in self.stop_ids), len(ids))
        attempts: list[Attempt] = []
        open_block = False
        for block in r.tool_calls:
            attempts.append(Attempt(self._block_text(block, ids[:kept]), _usable(block)))
            open_block = str(block.status) == "unclosed_block"
        has_reasoning = r.reasoning_content is not None or r.reasoning_complete is False
        return Parsed(
            reasoning=r.reasoning_content or "",
            content=r.content or "",
            attempts=attempts,
            reasoning_open=r.reasoning_complete is False,
            reasoning_closed=not has_reasoning or (self._think_end is not None and self._think_end in ids[:kept]),
            open_block=open_block,
        )

    def _block_text(self, block: Any, ids: list[int]) -> str:
        if block.token_span is None:
            return block.raw
        start, end = block.token_span
        return self.decode(ids[start:end])

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def reasoning_tokens(self, ids: list[int], message: Message) -> int:
        """How many tokens of a sample are its reasoning, its markers included; 0 where no token ends it."""
        if self._think_end is None or not message.get("reasoning_content"):
            return 0
        if self._think_end in ids:
            return ids.index(self._think_end) + 1
        return 0 if message["content"] or message.get("tool_calls") else len(ids)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _usable(block: Any) -> ParsedCall | None:
    """The call of a parsed block, or None: it is answered as text then."""
    arguments = {} if block.arguments is None else block.arguments
    named = isinstance(block.name, str) and block.name
    if str(block.status) not in _USABLE or not named or not isinstance(arguments, dict):
        return None
    try:
        # NaN and infinities are not JSON; no client could read them.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(arguments)  # lone surrogates survive only as escapes
    except ValueError:
        return None
    try:
        block.name.encode()
    except UnicodeEncodeError:
        return None
    return ParsedCall(block.name, text, block.id or "")


def _load_tokenizer(where: str, source: str) -> Any:
    from transformers import AutoTokenizer

    local = Path(source).exists()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except (OSError, ValueError) as e:
        raise InvalidConfig(f"{where}.tokenizer: can't load '{source}': {' '.join(str(e).split())[:300]}") from e
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidConfig(f"{where}.tokenizer: '{source}' has no fast tokenizer (tokenizer.json)")
    return tokenizer


def _renderer(where: str, row: Model, tokenizer: Any) -> Any:
    from renderers import create_renderer
    from renderers.configs import DefaultRendererConfig, config_from_name
    from renderers.parsers import REASONING_PARSERS, TOOL_PARSERS

    if row.renderer != "template":
        for name in ("tool_parser", "reasoning_parser"):
            if getattr(row, name) is not None:
                raise InvalidConfig(f"{where}.{name}: belongs to renderer 'template'; '{row.renderer}' brings its own")
        try:
            return create_renderer(tokenizer, config_from_name(row.renderer))
        except Exception as e:
            raise InvalidConfig(f"{where}.renderer: '{row.renderer}': {' '.join(str(e).split())[:300]}") from e
    for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        value = getattr(row, name)
        if value is not None and value not in known:
            raise InvalidConfig(f"{where}.{name}: unknown '{value}'; allowed: {', '.join(sorted(known))}")
    if not tokenizer.chat_template:
        raise InvalidConfig(
            f"{where}.tokenizer: '{row.tokenizer}' has no chat template; set renderer to a name instead"
        )
    config = DefaultRendererConfig(tool_parser=row.tool_parser, reasoning_parser=row.reasoning_parser)
    return create_renderer(tokenizer, config)


def _late_system(renderer: Any) -> bool:
    """Whether a system message after the first shows in the prompt."""

    def ids(word: str) -> Any:
        turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("system", word), ("user", "V")]
        try:
            return renderer.render_ids([{"role": r, "content": c} for r, c in turns], add_generation_prompt=True)
        except Exception:
            return None

    one, other = ids("north"), ids("south")
    return one is not None and one != other
