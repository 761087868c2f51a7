"""OpenAI Responses. Every field and what becomes of it: docs/proxy/openai_responses.md."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import INSTRUCTED, Answer, Call, Cited, Encoder, ModelCard, Recalled, Route
from proxy.dialects.responses_ids import completion_of, item_id, seal
from proxy.dialects.responses_items import History, is_reference
from proxy.dialects.responses_stream import StreamEncoder, folded, usage
from proxy.dialects.responses_tools import Toolbox
from proxy.failures import CallError, bad
from proxy.neutral import Event, Finish, Request

_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "max_tool_calls": "max_tool_calls",
    "top_logprobs": "top_logprobs",
    "truncation": "truncation",
    "context_management": "context_management",
}
# What may differ between two tries of one call, or changes only how it is told.
_VOLATILE = {
    "stream",
    "stream_options",
    "include",
    "store",
    "metadata",
    "client_metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
_REFUSED = {
    "background": "an answer lives as long as its call",
    "conversation": "conversations are not stored here: send the items themselves in 'input'",
    "prompt": "prompt templates are not stored here: send the items themselves in 'input'",
}
_SUMMARISE = (
    "The conversation above is about to be cut off, and another turn will go on from your summary of it. Besides that"
    " summary it will see nothing of the above. Write down what it needs: the task and its conditions, what was done and"
    " found out (files, commands, results, decisions and their reasons), what doesn't work, and what is left to do."
    " Answer with the summary alone and call no tool."
)
_READ = {
    *_WISHES,
    *_REFUSED,
    "model",
    "input",
    "instructions",
    "tools",
    "max_output_tokens",
    "reasoning",
    "text",
    "include",
    "stream",
    "previous_response_id",
}
_SUMMARIES = ("auto", "concise", "detailed", "none")
_encode = msgspec.json.Encoder().encode


class OpenAIResponses:
    name = "openai_responses"
    own = re.compile(r"(?:/v1)?/responses(?:/|$)")
    routes = (
        Route("POST", r"(?:/v1)?/responses", "generate"),
        Route("GET", r"(?:/v1)?/responses", "websocket"),
        Route("POST", r"(?:/v1)?/responses/(?P<compact>compact)", "generate"),
        Route("POST", r"(?:/v1)?/responses/input_tokens", "count"),
        # Nothing is stored: `model` says so for every way to ask for a stored answer.
        Route("GET", r"(?:/v1)?/responses/(?P<model>[^/]+(?:/input_items)?)", "model"),
        Route("DELETE", r"(?:/v1)?/responses/(?P<model>[^/]+)", "model"),
        Route("POST", r"(?:/v1)?/responses/(?P<model>[^/]+/cancel)", "model"),
    )
    broken: Literal["reset", "end"] = "reset"

    def cites(self, body: dict[str, Any]) -> Cited | None:
        given = body.get("input")
        named = [i for i in given if isinstance(i, dict) and is_reference(i)] if isinstance(given, list) else []
        items = frozenset(c for i in named if (c := completion_of(i.get("id"))))
        after = completion_of(body.get("previous_response_id"))
        return Cited(items=items, after=after or "") if items or after else None

    def parse(self, body: dict[str, Any], call: Call) -> Request:
        endpoint = "compact" in call.params
        _refuse(body)
        tools = Toolbox()
        tools.offer(fields.items(body, "tools"), "tools")
        history = History(tools, call.recalled)
        told = fields.text(body, "instructions") if body.get("instructions") is not None else ""
        if told:
            history.say("system", told)
        _go_on(body, call.recalled, history)
        _read(body, history)
        if not history.messages:
            raise bad("'input' must have at least one item", "input")
        compact = "endpoint" if endpoint else "item" if history.compact else ""
        if compact:
            history.say("user", _SUMMARISE)
        reasoning = _reasoning(body, history)
        wishes, limit = _wishes(body, reasoning)
        choice = tools.choice(body.get("tool_choice"))
        settings = body if "text" not in history.updates else body | {"text": history.updates["text"]}
        same = {k: v for k, v in body.items() if k not in _VOLATILE}
        include = fields.items(body, "include")
        extra = {
            "tools": tools,
            "compact": compact,
            "users": history.users,
            "sealed": "reasoning.encrypted_content" in include,
            "summarised": "summary" in reasoning,
            "echo": _echo(body),
        }
        return Request(
            model=fields.text(body, "model", "") if body.get("model") is not None else "",
            messages=history.messages,
            tools=tools.offered,
            tool_choice="none" if compact else choice,
            wishes=wishes,
            max_tokens=limit,
            stream=fields.flag(body, "stream") and not endpoint,
            identity=(b"compact\0" if endpoint else b"") + _encode(same),
            images=history.reader.images,
            schema=None if compact else _schema(settings),
            role="compaction" if compact else None,
            labels=_labels(body, tools) | ({INSTRUCTED: "yes"} if told else {}),
            extra=extra,
        )

    def error(self, error: CallError) -> tuple[int, bytes]:
        # Codex tries any refusal but a 400 again.
        status = 400 if error.kind == "limit" else error.status
        kind = {401: "authentication_error", 403: "permission_error"}.get(status, "invalid_request_error")
        if status >= 500:
            kind = "server_error"
        param = "input" if error.param == "messages" else error.param
        return status, _encode({"error": {"message": error.message, "type": kind, "code": error.code, "param": param}})

    def encoder(self, answer: Answer) -> Encoder:
        return StreamEncoder(answer)

    def whole(self, answer: Answer, events: list[Event]) -> bytes:
        output = folded(answer, events)
        if answer.request.extra["compact"] == "endpoint":
            return _compacted(answer, output.summary(), events[-1])
        assert output.response is not None
        return _encode(output.response)

    def counted(self, tokens: int) -> bytes:
        return _encode({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, cards: list[ModelCard]) -> bytes:
        raise NotImplementedError  # no route of this dialect lists models

    def model(self, card: ModelCard) -> bytes:
        raise CallError("not_found", "answers are not stored here: none can be fetched, cancelled or deleted")


def _refuse(body: dict[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if body.get(name):
            raise bad(f"'{name}' is not supported: {why}", name, "unsupported_parameter")


def _go_on(body: dict[str, Any], recalled: Recalled, history: History) -> None:
    """After `previous_response_id`: all that was said up to that answer, but for the instructions of its request."""
    if body.get("previous_response_id") is None:
        return
    name = fields.text(body, "previous_response_id")
    earlier = recalled.conversation
    if not earlier or earlier[-2:-1] == [{"role": "user", "content": _SUMMARISE}]:
        why = "a compaction: send its items" if earlier else "no answer in this session: send the whole 'input'"
        raise bad(
            f"Previous response with id '{name:.80}' not found: it is {why}",
            "previous_response_id",
            "previous_response_not_found",
        )
    history.go_on(earlier[1:] if recalled.instructed else earlier)


def _read(body: dict[str, Any], history: History) -> None:
    given = body.get("input")
    if isinstance(given, str):
        item = {"type": "message", "role": "user", "content": given}
        history.add(item, "input")
        return
    if given is not None and not isinstance(given, list):
        raise bad("'input' must be a string or a list of items", "input")
    for i, item in enumerate(given or ()):
        history.add(item, f"input[{i}]")
    history.close()


def _reasoning(body: dict[str, Any], history: History) -> dict[str, str]:
    """What is asked of the reasoning: `effort` and `summary`, where they are."""
    given = {**_object(body, "reasoning"), **history.updates.get("reasoning", {})}
    names = ("effort", "generate_summary", "summary")  # the second is the old name of the third
    out = {k: fields.text_at(given, k, "reasoning") for k in names if given.get(k) is not None}
    for name in names[1:]:
        if out.get(name, "none") not in _SUMMARIES:
            allowed = ", ".join(_SUMMARIES)
            raise bad(f"'reasoning.{name}' is {out[name]!r:.40}, allowed: {allowed}", f"reasoning.{name}")
    old = out.pop("generate_summary", "none")
    summary = out.pop("summary", old)
    return out if summary == "none" else out | {"summary": summary}


def _wishes(body: dict[str, Any], reasoning: dict[str, str]) -> tuple[dict[str, Any], int | None]:
    wishes = fields.wishes(body, _WISHES)
    limit = fields.count(body, "max_output_tokens")
    if limit is not None:
        wishes["max_tokens"] = limit
    wishes |= {f"reasoning_{k}": v for k, v in reasoning.items()}
    if (verbosity := _object(body, "text").get("verbosity")) is not None:
        wishes["verbosity"] = verbosity
    return wishes, limit


def _labels(body: dict[str, Any], tools: Toolbox) -> dict[str, str]:
    """What was left out of account, for the record."""
    ignored = sorted(k for k, v in body.items() if k not in _READ | _VOLATILE and v is not None)
    left_out = {"ignored_fields": ignored, "dropped_tools": tools.dropped}
    return {k: ",".join(v)[:500] for k, v in left_out.items() if v}


def _schema(body: dict[str, Any]) -> dict[str, Any] | None:
    form = _object(_object(body, "text"), "format", "text.format")
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind == "json_schema":
        return fields.obj(form.get("schema"), "text.format.schema")
    raise bad(f"'text.format.type' is {kind!r:.40}, allowed: text, json_object, json_schema", "text.format.type")


def _echo(body: dict[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request, with OpenAI's defaults."""
    shaped = _object(body, "text")
    reasoning = _object(body, "reasoning")
    parallel = body.get("parallel_tool_calls")
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
        "text": {"format": {"type": "text"}, **shaped},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
        "truncation": "disabled",
        "user": body.get("user"),
    }


def _compacted(answer: Answer, summary: str, last: Event) -> bytes:
    """The user's messages as they were, then the summary in one item."""
    assert isinstance(last, Finish)
    output: list[Any] = []
    for i, said in enumerate(answer.request.extra["users"]):
        content = said.get("content")
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        kept = {"type": "message", "id": item_id("usr", answer.id, i), "role": "user", "status": "completed"}
        output.append({**kept, "content": content})
    sealed = seal("compaction", answer.id, summary)
    output.append({"type": "compaction", "id": item_id("cmp", answer.id, len(output)), "encrypted_content": sealed})
    head = {"id": item_id("resp", answer.id), "object": "response.compaction", "created_at": answer.created}
    return _encode({**head, "output": output, "usage": usage(last.usage)})


def _object(body: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    value = body.get(name)
    return {} if value is None else fields.obj(value, where or name)
