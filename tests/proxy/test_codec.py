"""The chat template as token ids, and extending a conversation without rendering it again."""

from __future__ import annotations

import numpy as np
import pytest

from polar import arrays
from polar.config import Model
from proxy.codec import Codec
from proxy.failures import CallError
from tests.proxy import toy_tokenizer

USER = {"role": "user", "content": "Look."}


def load(folder, template: str) -> Codec:
    return Codec("toy", Model(engine="", tokenizer=str(toy_tokenizer.build(folder, template)), tool_parser="qwen3"))


def test_the_bridge_is_proven_for_a_template_that_appends(codec):
    assert codec.bridge is not None and codec.bridge.roles == {"user", "tool", "system"}


@pytest.mark.parametrize(
    "old, new",
    [
        # A turn that looks different once another follows it.
        ("{{ m.content }}\n{%- for c in", "{% if loop.last %}(last) {% endif %}{{ m.content }}\n{%- for c in"),
        # Something in front of a turn that depends on what follows.
        ("<|im_start|>assistant\n{{ m.content }}", "<|im_start|>assistant\n{{ messages | length }}{{ m.content }}"),
        # A turn that isn't closed.
        ("</tool_call>{% endfor %}<|im_end|>\n", "</tool_call>{% endfor %}\n"),
    ],
)
def test_a_template_that_does_not_append_gets_no_bridge(tmp_path, old, new):
    assert old in toy_tokenizer.TEMPLATE
    codec = load(tmp_path, toy_tokenizer.TEMPLATE.replace(old, new))
    appended = "(last)" in new
    # The first one still appends where it matters: a turn is never last once something follows it.
    assert (codec.bridge is None) is not appended


async def test_extending_equals_rendering_for_a_canonical_turn(codec):
    history = [{"role": "system", "content": "Be careful."}, USER]
    turn = {"role": "assistant", "content": "I look. 🎁"}
    new = [{"role": "user", "content": "And?"}, {"role": "user", "content": "So?"}]
    prompt = await codec.render(history, [])
    sampled = arrays.ids([*codec._tokenizer.encode("I look. 🎁", add_special_tokens=False), max(codec.stop_ids)])
    extended = await codec.extend(prompt, sampled, turn, new, [])
    assert np.array_equal(extended, await codec.render([*history, turn, *new], []))
    cut = await codec.extend(prompt, sampled[:-1], turn, new, [])
    assert np.array_equal(cut, extended)


async def test_a_system_message_in_mid_conversation_is_not_lost(codec, tmp_path):
    messages = [USER, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": "Hurry."}]
    text = codec.decode((await codec.render(messages, [])).tolist())
    assert "Hurry." in text
    # A template that drops it: it becomes the user's.
    dropping = toy_tokenizer.TEMPLATE.replace("m.role == 'system' and loop.first", "m.role == 'system'")
    other = load(tmp_path, dropping)
    text = other.decode((await other.render(messages, [])).tolist())
    assert "<|im_start|>user\nHurry.<|im_end|>" in text


async def test_a_template_that_refuses_is_the_callers_error(tmp_path):
    codec = load(tmp_path, "{{ raise_exception('only poems') }}")
    with pytest.raises(CallError, match="only poems") as e:
        await codec.render([USER], [])
    assert e.value.status == 400


async def test_a_named_renderer_brings_its_own_bridge(tokenizer_folder):
    codec = Codec("named", Model(engine="", tokenizer=str(tokenizer_folder), renderer="qwen3"))
    prompt = await codec.render([USER], [])
    call = '<tool_call>\n{"name": "run",  "arguments": {}}\n</tool_call>'
    sampled = arrays.ids([*codec._tokenizer.encode(call, add_special_tokens=False), max(codec.stop_ids)])
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "run", "arguments": "{}"}}],
    }
    tool = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    extended = await codec.extend(prompt, sampled, turn, [tool], [])
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)].tolist() == [*prompt, *sampled]
    # This family drops old reasoning at a new question: no bridge there, the proxy renders in full.
    assert await codec.extend(prompt, sampled, turn, [USER], []) is None


# A template that leaves reasoning out of all turns before the last question, as Qwen3's does.
FORGETFUL = toy_tokenizer.TEMPLATE.replace(
    "{%- for m in messages %}",
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{%- endfor %}{%- for m in messages %}",
).replace(
    "<|im_start|>assistant\n{{ m.content }}",
    "<|im_start|>assistant\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}",
)


async def test_reasoning_that_the_template_forgets_is_kept_by_going_on(tmp_path):
    codec = load(tmp_path, FORGETFUL)
    assert codec.bridge is not None and codec.bridge.roles == {"user", "tool", "system"}
    prompt = await codec.render([USER], [])
    text = "<think>\nHm.\n</think>\n\nA cat."
    sampled = arrays.ids([*codec._tokenizer.encode(text, add_special_tokens=False), max(codec.stop_ids)])
    turn = {"role": "assistant", "content": "A cat.", "reasoning_content": "Hm."}
    extended = await codec.extend(prompt, sampled, turn, [USER], [])
    whole = codec.decode(extended.tolist())
    rendered = codec.decode((await codec.render([USER, turn, USER], [])).tolist())
    assert "Hm." in whole and "Hm." not in rendered
    assert whole.partition("A cat.")[2] == rendered.partition("A cat.")[2], "what follows the turn is the template's"


@pytest.mark.parametrize(
    "old, new, role",
    [
        # Results in a row get a number of their own: the stub's turn doesn't know how many there were.
        ("{{ m.content }}\n</tool_response>", "{{ loop.index }}{{ m.content }}\n</tool_response>", "tool"),
        # Later system messages go to the front.
        (
            "{%- for m in messages %}",
            "{% for m in messages[1:] if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{%- for m in messages if m.role != 'system' or m == messages[0] %}",
            "system",
        ),
    ],
)
async def test_what_a_template_does_otherwise_is_rendered_in_full_and_the_rest_bridged(tmp_path, old, new, role):
    assert old in toy_tokenizer.TEMPLATE
    codec = load(tmp_path, toy_tokenizer.TEMPLATE.replace(old, new))
    assert codec.bridge is not None and "user" in codec.bridge.roles and role not in codec.bridge.roles
    prompt, sampled = await codec.render([USER], []), arrays.ids([max(codec.stop_ids)])
    turn = {"role": "assistant", "content": ""}
    _, why = await codec.extended(prompt, sampled, turn, [{"role": role, "content": "x", "tool_call_id": "1"}], [])
    assert f"not proven for a message of role {role}" in why and codec.bridge.refuted[role] in why
    ids, why = await codec.extended(prompt, sampled, turn, [USER], [])
    assert ids is not None and why == ""


async def test_why_there_is_no_bridge_is_told(tmp_path):
    changed = toy_tokenizer.TEMPLATE.replace(
        "<|im_start|>assistant\n{{ m", "<|im_start|>assistant\n{{ messages | length }}{{ m"
    )
    codec = load(tmp_path, changed)
    ids, why = await codec.extended(await codec.render([USER], []), arrays.ids([max(codec.stop_ids)]), {}, [USER], [])
    assert ids is None and why == f"the template has no bridge: {codec.unbridged}" and "rendered otherwise" in why


async def test_a_bridge_that_changes_what_was_sampled_is_not_used(tokenizer_folder):
    codec = Codec("named", Model(engine="", tokenizer=str(tokenizer_folder), renderer="qwen3"))
    prompt = await codec.render([USER], [])
    stop = max(codec.stop_ids)
    # More tokens behind the end of the turn, as an engine may send that ignores it: the renderer would cut them off.
    sampled = arrays.ids([*codec._tokenizer.encode("Hi", add_special_tokens=False), stop, 5, 6])
    tool = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    ids, why = await codec.extended(prompt, sampled, {"role": "assistant", "content": "Hi"}, [tool], [])
    assert ids is None and "changes what was sampled" in why
    codec.close()
