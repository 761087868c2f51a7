"""Chat Completions requests to neutral ones. docs/proxy/openai_chat.md lists every field."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.dialects import fields, openai_chat_tools
from proxy.failures import bad
from proxy.neutral import Message, Request

_encode = msgspec.json.Encoder().encode

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "reasoning_effort": "reasoning_effort",
    "reasoning": "reasoning",
    "thinking": "thinking",
    "verbosity": "verbosity",
}
# How an answer is brought, and what is about the caller: two requests that differ in nothing else are the same call.
_VOLATILE = {
    "stream",
    "stream_options",
    "store",
    "metadata",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "prediction",
}
_READ = {
    *_WISHES,
    "model",
    "messages",
    "tools",
    "n",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "response_format",
    "modalities",
}
_REFUSED = {
    "functions": ("use 'tools'", "invalid_request"),
    "function_call": ("use 'tool_choice'", "invalid_request"),
    "audio": ("this model answers in text only", "unsupported_content"),
    "web_search_options": ("nothing here can search", "unsupported_tool"),
}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse(body: dict[str, Any]) -> Request:
    """Raises CallError (`bad_request`) naming the field."""
    _refuse(body)
    reader = _Reader()
    for i, m in enumerate(fields.items(body, "messages")):
        reader.add(m, f"messages[{i}]")
    if not reader.messages:
        raise bad("'messages' must have at least one message", "messages")
    tools = openai_chat_tools.read(fields.items(body, "tools"))
    limit = fields.count(body, "max_completion_tokens") or fields.count(body, "max_tokens")
    stop = fields.stops(body, "stop")
    wishes = fields.wishes(body, _WISHES)
    wishes |= {k: v for k, v in (("max_tokens", limit), ("stop", stop)) if v}
    ignored = sorted(k for k, v in body.items() if k not in _READ and v is not None)
    return Request(
        model=fields.text(body, "model", ""),
        messages=reader.messages,
        tools=tools.offered,
        tool_choice=openai_chat_tools.choice(body.get("tool_choice"), tools),
        wishes=wishes,
        max_tokens=limit,
        stop=stop,
        stream=fields.flag(body, "stream"),
        identity=_encode({k: v for k, v in body.items() if k not in _VOLATILE}),
        images=reader.images,
        schema=_schema(body.get("response_format")),
        labels={"ignored_fields": ",".join(ignored)[:500]} if ignored else {},
        extra={"include_usage": _include_usage(body.get("stream_options")), "custom": tools.custom},
    )


def _refuse(body: dict[str, Any]) -> None:
    if (n := fields.count(body, "n")) is not None and n != 1:
        raise bad(f"'n' is {n}, only 1 is supported: sample again instead", "n")
    for name, (why, code) in _REFUSED.items():
        # An empty object asks for it, too, with every option left as it is.
        if body.get(name) not in (None, [], "none", "auto"):
            raise bad(f"'{name}' is not supported: {why}", name, code)
    if any(m != "text" for m in fields.items(body, "modalities")):
        raise bad("'modalities' may only have 'text': this model answers in text", "modalities", "unsupported_content")


def _include_usage(options: Any) -> bool:
    where = "stream_options"
    return options is not None and fields.flag_at(fields.obj(options, where), "include_usage", where)


def _schema(value: Any) -> dict[str, Any] | None:
    """The JSON schema of the answer; {} for any JSON object."""
    if value is None:
        return None
    form = fields.obj(value, "response_format")
    kind = fields.text_at(form, "type", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        raise bad(
            f"response_format.type is {kind!r:.40}, allowed: text, json_object, json_schema",
            "response_format.type",
            "unsupported_response_format",
        )
    where = "response_format.json_schema"
    return fields.obj(fields.obj(form.get("json_schema"), where).get("schema"), f"{where}.schema")


class _Reader:
    """The messages read so far. `images` counts what a text model can't see."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.images = 0
        self._function_calls = 0  # of the kind before tools: they have no ids

    def add(self, raw: Any, where: str) -> None:
        m = fields.obj(raw, where)
        given = m.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            raise bad(f"{where}.role is {given!r:.40}, allowed: {', '.join(_ROLES)}", f"{where}.role")
        out: Message = {"role": role, "content": self._content(m.get("content"), f"{where}.content")}
        if given == "function":
            out["tool_call_id"] = f"function_call_{self._function_calls}"
        elif role == "tool":
            out["tool_call_id"] = fields.text_at(m, "tool_call_id", where, "")
        if role == "tool" and isinstance(m.get("name"), str):
            out["name"] = m["name"]
        if role == "assistant":
            self._assistant(out, m, where)
        self.messages.append(out)

    def _assistant(self, out: Message, m: dict[str, Any], where: str) -> None:
        if not out["content"]:
            out["content"] = fields.text_at(m, "refusal", where, "")
        if thought := _reasoning(m, where):
            out["reasoning_content"] = thought
        raw = fields.items({f"{where}.tool_calls": m.get("tool_calls")}, f"{where}.tool_calls")
        calls = [openai_chat_tools.call(c, f"{where}.tool_calls[{j}]") for j, c in enumerate(raw)]
        if m.get("function_call") is not None:
            self._function_calls += 1
            inner = openai_chat_tools.function(m["function_call"], f"{where}.function_call")
            calls.append({"id": f"function_call_{self._function_calls}", "type": "function", "function": inner})
        if calls:
            out["tool_calls"] = calls

    def _content(self, value: Any, where: str) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise bad(f"'{where}' must be a string or a list of parts", where)
        return "".join(p if isinstance(p, str) else self._part(p, f"{where}[{j}]", where) for j, p in enumerate(value))

    def _part(self, raw: Any, at: str, where: str) -> str:
        part = fields.obj(raw, at)
        kind = part.get("type")
        if isinstance(kind, str) and kind in _TEXTS:
            return fields.text_at(part, _TEXTS[kind], at)
        if kind in ("image_url", "input_image"):
            image = part.get("image_url")
            url = fields.text_at(image if isinstance(image, dict) else {"url": image}, "url", f"{at}.image_url")
            self.images += 1
            return fields.image_placeholder(_media_type(url), url)
        raise bad(f"{at} has type {kind!r:.40}; this model reads text only", where, "unsupported_content")


def _media_type(url: str) -> str:
    """Of a data URL; "" of any other."""
    return url[5:80].partition(",")[0].partition(";")[0] if url[:5].lower() == "data:" else ""


def _reasoning(m: dict[str, Any], where: str) -> str:
    """The reasoning of a turn, in whichever of the forms that clients keep it."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(m.get(name), str) and m[name]:
            return m[name]
    texts = []
    for j, raw in enumerate(
        fields.items({f"{where}.reasoning_details": m.get("reasoning_details")}, f"{where}.reasoning_details")
    ):
        detail = fields.obj(raw, f"{where}.reasoning_details[{j}]")
        texts.append(fields.text_at(detail, "text", f"{where}.reasoning_details[{j}]", ""))
    return "".join(texts)
