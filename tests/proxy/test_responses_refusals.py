"""What Responses refuses, as the official client is told of it."""

from __future__ import annotations

import openai
import pytest

from tests.proxy.responses_client import client, user


@pytest.mark.parametrize(
    "change, field, code",
    [
        ({"input": []}, "input", "invalid_request"),
        ({"input": 3}, "input", "invalid_request"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "item_not_found"),
        ({"input": [{"id": "x"}]}, "input[0].id", "item_not_found"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "invalid_request"),
        ({"previous_response_id": 3}, "previous_response_id", "invalid_request"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_request"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "unsupported_item"),
        ({"input": [{"type": "spell"}]}, "input[0].type", "invalid_request"),
        ({"input": [{"role": "wizard", "content": ""}]}, "input[0].role", "invalid_request"),
        ({"input": [user([{"type": "input_audio"}])]}, "input[0].content[0]", "unsupported_content"),
        ({"input": [user([{"type": "input_file", "file_id": "f"}])]}, "input[0].content[0]", "unsupported_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content", "invalid_item"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name", "invalid_request"),
        ({"input": [{"type": "function_call_output", "call_id": 3}]}, "input[0].call_id", "invalid_request"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
        ({"temperature": "hot"}, "temperature", "invalid_request"),
        ({"tools": [{"type": "wand"}]}, "tools[0].type", "invalid_request"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_request"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "invalid_request"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 3}}, "tool_choice.tools", "invalid_request"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"tool_choice": {"type": "function", "name": "fly"}}, "tool_choice.name", "invalid_request"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "invalid_request",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_request"),
        ({"input": "word " * 5000}, "input", "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_served_is_refused_naming_the_field(world, change, field, code):
    capability, grant = world.mint()
    with pytest.raises(openai.BadRequestError) as e:
        await client(world, capability).responses.create(**{"model": "m", "input": "go", **change})
    assert (e.value.param, e.value.code) == (field, code), e.value.message
    assert world.stored(grant) == [] and world.engine.served == []
