"""/generate on the wire: shapes, stops, streams, errors."""

import pytest

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


async def test_answer_has_sglangs_shape(client, prompt):
    answer = await client.generate(prompt, params=GREEDY, return_logprob=True, rid="mine")
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(prompt), 8, 0)
    assert meta["weight_version"] == "v0"
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 8}]
    assert meta["e2e_latency"] > 0
    assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(row[0] <= 0 and row[2] is None for row in meta["output_token_logprobs"])
    assert meta["output_token_logprobs_length"] == 8
    assert meta["input_token_logprobs"] == []
    assert answer["text"] == client.engine.tokenizer.decode(answer["output_ids"])


async def test_put_and_defaults(client, prompt):
    status, answer = await client.call("/generate", {"input_ids": prompt, "made_up_field": 1}, method="PUT")
    assert status == 200
    assert answer["meta_info"]["completion_tokens"] <= 128
    assert "output_token_logprobs" not in answer["meta_info"]


async def test_batch_and_n_answer_lists(client, prompt):
    batch = await client.generate([prompt, prompt[:3]], params=[GREEDY, {**GREEDY, "max_new_tokens": 2}], rid="b")
    assert [item["meta_info"]["id"] for item in batch] == ["b_0", "b_1"]
    assert [item["meta_info"]["completion_tokens"] for item in batch] == [8, 2]
    samples = await client.generate(prompt, params={"n": 3, "max_new_tokens": 6, "sampling_seed": 5})
    assert len(samples) == 3
    assert len({tuple(item["output_ids"]) for item in samples}) == 3
    assert len(await client.generate([prompt], params=GREEDY)) == 1


async def test_text_is_tokenised_plainly(client, prompt):
    text = client.engine.tokenizer.decode(prompt, skip_special_tokens=False)
    one = await client.generate(text=text, params=GREEDY, return_prompt_token_ids=True)
    assert one["prompt_token_ids"] == prompt
    assert len(await client.generate(text=[text, "a"], params=GREEDY)) == 2


async def test_stop_token_is_in_the_ids_but_not_in_the_text(client, prompt):
    free = (await client.generate(prompt, params=GREEDY))["output_ids"]
    stop = free[2]
    at = free.index(stop)
    params = {"temperature": 0, "stop_token_ids": [stop]}
    stopped = await client.generate(prompt, params=params)
    assert stopped["output_ids"] == free[: at + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == client.engine.tokenizer.decode(free[:at])
    whole = await client.generate(prompt, params={**params, "no_stop_trim": True})
    assert whole["text"] == client.engine.tokenizer.decode(free[: at + 1])
    on = await client.generate(prompt, params={**params, "ignore_eos": True, "max_new_tokens": 8})
    assert on["output_ids"] == free


async def test_end_of_sequence_ends_and_min_new_tokens_holds_it_off(client, prompt):
    free = (await client.generate(prompt, params=GREEDY))["output_ids"]
    client.engine.scheduler.eos = frozenset({free[0]})
    ended = await client.generate(prompt, params={"temperature": 0})
    assert ended["output_ids"] == free[:1]
    longer = await client.generate(prompt, params={"temperature": 0, "min_new_tokens": 3, "max_new_tokens": 9})
    assert len(longer["output_ids"]) > 3
    assert free[0] not in longer["output_ids"][:3]


async def test_stop_string(client, prompt):
    free = await client.generate(prompt, params=GREEDY)
    pieces = [client.engine.tokenizer.decode([token]) for token in free["output_ids"]]
    stop = pieces[1][-2:] + pieces[2][:2]  # across two tokens
    stopped = await client.generate(prompt, params={**GREEDY, "stop": ["never there", stop]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    assert stopped["output_ids"] == free["output_ids"][:3]
    whole = await client.generate(prompt, params={**GREEDY, "stop": stop, "no_stop_trim": True})
    assert whole["text"] == stopped["text"] + stop
    assert whole["output_ids"] == stopped["output_ids"]
    chunks = await client.stream(prompt, params={**GREEDY, "stop": stop})
    assert all(stopped["text"].startswith(chunk["text"]) for chunk in chunks)  # no beginning of a stop leaks out


async def test_special_tokens_are_skipped_unless_wanted(client, prompt):
    free = (await client.generate(prompt, params=GREEDY))["output_ids"]
    scheduler = client.engine.scheduler

    def always_special(logits, requests, eos):
        logits[:, 1] = 1e4
        return sample(logits, requests, eos)

    import engine.scheduler

    sample, engine.scheduler.sample = engine.scheduler.sample, always_special
    try:
        assert scheduler.eos == {2}
        hidden = await client.generate(prompt, params=GREEDY)
        shown = await client.generate(prompt, params={**GREEDY, "skip_special_tokens": False})
    finally:
        engine.scheduler.sample = sample
    assert hidden["text"] == ""
    assert shown["text"] == "<|im_start|>" * len(free)


async def test_scoring_a_sequence(client, prompt, plain):
    params = {"max_new_tokens": 0}
    answer = await client.generate(prompt, params=params, return_logprob=True, logprob_start_len=0)
    meta = answer["meta_info"]
    assert answer["output_ids"] == [] and meta["output_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 0}]
    assert [row[1] for row in meta["input_token_logprobs"]] == prompt
    assert meta["input_token_logprobs"][0][0] is None
    expected = plain(prompt)
    for index, row in enumerate(meta["input_token_logprobs"][1:], start=1):
        assert row[0] == pytest.approx(expected[index - 1, prompt[index]].item(), abs=1e-4)


async def test_alternatives_and_texts(client, prompt):
    answer = await client.generate(
        prompt,
        params=GREEDY,
        return_logprob=True,
        top_logprobs_num=3,
        token_ids_logprob=[5, 6],
        return_text_in_logprobs=True,
        logprob_start_len=7,
    )
    meta = answer["meta_info"]
    decode = client.engine.tokenizer.decode
    for chosen, top, probed in zip(
        meta["output_token_logprobs"],
        meta["output_top_logprobs"],
        meta["output_token_ids_logprobs"],
        strict=True,
    ):
        assert len(top) == 3 and top[0] == chosen  # greedy
        assert [row[1] for row in probed] == [5, 6]
        assert chosen[2] == decode([chosen[1]], False)
    assert [row and len(row) for row in meta["input_top_logprobs"]] == [None, 3, 3]
    assert [row[1] for row in meta["input_token_logprobs"]] == prompt[7:]


async def test_stream_is_cumulative(client, prompt):
    whole = await client.generate(prompt, params=GREEDY, return_logprob=True)
    chunks = await client.stream(prompt, params=GREEDY, return_logprob=True, rid="s")
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    before: dict = {"text": "", "output_ids": []}
    for chunk in chunks:
        assert chunk["text"].startswith(before["text"])
        assert chunk["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])
        assert chunk["meta_info"]["id"] == "s"
        before = chunk
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 8}]


async def test_stream_of_several(client, prompt):
    chunks = await client.stream(prompt, params={"n": 2, "max_new_tokens": 4, "ignore_eos": True})
    last = {chunk["index"]: chunk for chunk in chunks}
    assert set(last) == {0, 1}
    assert all(chunk["meta_info"]["finish_reason"] for chunk in last.values())


async def test_incremental_stream(serve, prompt):
    async with serve(incremental_stream=True) as client:
        whole = await client.generate(prompt, params=GREEDY, return_logprob=True)
        chunks = await client.stream(prompt, params=GREEDY, return_logprob=True)
    assert [token for chunk in chunks for token in chunk["output_ids"]] == whole["output_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    rows = [row for chunk in chunks for row in chunk["meta_info"]["output_token_logprobs"]]
    assert [row[1] for row in rows] == whole["output_ids"]


async def test_output_is_clamped_to_the_context(serve, prompt):
    async with serve(context_length=16) as client:
        answer = await client.generate(prompt, params={"max_new_tokens": 500, "ignore_eos": True})
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        answer = await client.generate(prompt, params={"max_new_tokens": None, "ignore_eos": True})
        assert answer["meta_info"]["completion_tokens"] == 6
        refused = await client.generate([5] * 16, status=400)
        message = "The input (16 tokens) is longer than the model's context length (16 tokens)."
        assert refused["error"]["message"] == message


REFUSALS = [
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({}, "Either text or input_ids"),
    ({"input_ids": [1, "a"]}, "list of integers"),
    ({"input_ids": [True]}, "list of integers"),
    ({"input_ids": [49152]}, "[0, 49151]"),
    ({"input_ids": [-1]}, "[0, 49151]"),
    ({"input_ids": [[1], []]}, "cannot be empty"),
    ({"input_ids": [1], "sampling_params": {"made_up": 1}}, "stop_token_ids, stream_interval"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "x"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "non-negative"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [99999]}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "no structured output"),
    ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "no structured output"),
    ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 items for 2 prompts"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len=3"),
    ({"input_ids": [1], "return_logprob": True, "token_ids_logprob": [99999]}, "token_ids_logprob"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate"),
    ({"input_ids": 7}, "input_ids"),
]


async def test_refusals(client):
    for body, part in REFUSALS:
        status, answer = await client.call("/generate", body)
        assert status == 400, body
        assert part in answer["error"]["message"], body


async def test_neutral_values_are_accepted(client, prompt):
    neutral = {
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "json_schema": None,
        "top_p": None,
        "stop": None,
    }
    await client.generate(prompt, params={**GREEDY, **neutral})


async def test_bad_json_and_unknown_paths(client):
    async with client.session.post(client.url + "/generate", data=b"{nope") as answer:
        assert answer.status == 400
    assert (await client.call("/v1/chat/completions", {}))[0] == 404
    assert (await client.call("/generate", method="GET"))[0] == 405


async def test_tokenize(client):
    _, one = await client.call("/tokenize", {"prompt": "hello 123"})
    assert one == {"tokens": [28120, 216, 33, 34, 35], "count": 5, "max_model_len": 32768}
    _, two = await client.call("/tokenize", {"prompt": ["a", "b c"]})
    assert two["count"] == [1, 2]
    _, chat = await client.call("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat["tokens"] == client.engine.tokenizer.encode(text)
    _, back = await client.call("/detokenize", {"tokens": chat["tokens"], "skip_special_tokens": False})
    assert back == {"text": text}
    assert (await client.call("/detokenize", {"tokens": [10**6]}))[0] == 400
    assert (await client.call("/tokenize", {"messages": [{"role": "alien", "content": ""}]}))[0] == 400
    assert (await client.call("/tokenize", {}))[0] == 400


async def test_status_pages(client, tiny):
    for path in ("/health", "/health_generate", "/ready"):
        assert (await client.call(path, method="GET"))[0] == 200
    _, info = await client.call("/model_info", method="GET")
    assert info["weight_version"] == "v0" and info["is_generation"] is True
    assert info["model_path"] == str(tiny) and info["architectures"] == ["LlamaForCausalLM"]
    assert (await client.call("/get_model_info", method="GET"))[1] == info
    _, models = await client.call("/v1/models", method="GET")
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("default", 32768)
    _, server = await client.call("/server_info", method="GET")
    assert server["max_running"] == 16 and server["internal_states"][0]["paused"] is False
