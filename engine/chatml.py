"""The chat template of the prepared models: ChatML with tools, written so that it only ever appends.

Rendering a conversation gives a text that starts with the rendering of every shorter version of it: there is
no default system prompt, every tool result is a turn of its own, and no text is trimmed. So an agent's next
request extends its last.
"""

CHATML = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- elif part.text is defined -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro toolbox() -%}
{{- "You have these tools, each one described by a JSON object:\\n<tools>" }}
{%- for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}
{{- "\\n</tools>\\nTo use a tool, write a block like the one below and nothing after your last block. " }}
{{- "The answers come back inside <tool_response> tags.\\n<tool_call>\\n" }}
{{- '{"name": "the tool", "arguments": {"argument": "value"}}' }}
{{- "\\n</tool_call>" }}
{%- endmacro -%}
{%- if tools and not (messages and messages[0].role in ["system", "developer"]) -%}
{{- "<|im_start|>system\\n" + toolbox() + "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ["system", "developer"] -%}
{{- "<|im_start|>system\\n" + text(message.content) -}}
{%- if loop.first and tools -%}{{- "\\n\\n" + toolbox() -}}{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- elif message.role == "user" -%}
{{- "<|im_start|>user\\n" + text(message.content) + "<|im_end|>\\n" -}}
{%- elif message.role == "tool" -%}
{{- "<|im_start|>user\\n<tool_response>\\n" + text(message.content) + "\\n</tool_response><|im_end|>\\n" -}}
{%- elif message.role == "assistant" -%}
{%- set said = text(message.content) -%}
{{- "<|im_start|>assistant\\n" + said -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{%- if said or not loop.first -%}{{- "\\n" -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' -}}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) -}}
{{- "}\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- else -%}
{{- raise_exception("This template knows the roles system, user, assistant and tool, not " + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
