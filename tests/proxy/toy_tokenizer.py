"""A small byte-level BPE tokenizer with Qwen's markers and a ChatML template, built from a few lines of text."""

from __future__ import annotations

from pathlib import Path

_LINES = [
    "You are a careful agent. Look at the box and tell what is inside.",
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    '{"name": "run", "arguments": {"command": "ls -la", "timeout": 10}}',
    "system user assistant tool response function arguments",
    "I think, therefore I run a command and read its output.",
]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {% set a = c.function.arguments -%}
{{ a if a is string else a | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build(folder: Path, template: str = TEMPLATE) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
