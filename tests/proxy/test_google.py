"""Google's official client against the proxy: whole and streamed answers, tools, thoughts, counts, models, errors."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types

from proxy.engines import pool

RUN = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="run",
            description="Run a command.",
            parameters=types.Schema(type="OBJECT", properties={"command": types.Schema(type="STRING")}),
        )
    ]
)
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
PNG = base64.b64decode("iVBORw0KGgo=")


def client(world, capability: str) -> Any:
    options = types.HttpOptions(base_url=f"{world.server.url}/s/{capability}")
    return genai.Client(api_key="x", vertexai=False, http_options=options).aio


def user(*parts: Any) -> types.Content:
    made = [types.Part(text=p) if isinstance(p, str) else p for p in parts]
    return types.Content(role="user", parts=made)


def said(response: Any) -> dict[str, Any]:
    """What a response, or the chunks of a stream, add up to."""
    chunks = response if isinstance(response, list) else [response]
    parts = [p for c in chunks for p in c.candidates[0].content.parts]
    return {
        "text": "".join(p.text or "" for p in parts if not p.thought),
        "thoughts": "".join(p.text or "" for p in parts if p.thought),
        "calls": [(p.function_call.id, p.function_call.name, p.function_call.args) for p in parts if p.function_call],
        "signatures": [p.thought_signature for p in parts if p.thought_signature],
        "finish": [c.candidates[0].finish_reason for c in chunks if c.candidates[0].finish_reason],
        "usage": [c.usage_metadata for c in chunks if c.usage_metadata],
        "id": {c.response_id for c in chunks},
    }


async def generate(world, capability: str, contents: Any, stream: bool = False, **config: Any) -> Any:
    api, options = client(world, capability).models, types.GenerateContentConfig(**config)
    if not stream:
        return await api.generate_content(model="m", contents=contents, config=options)
    return [c async for c in await api.generate_content_stream(model="m", contents=contents, config=options)]


async def post(world, path: str, body: Any, method: str = "POST", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, world.server.url + path, json=body, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


async def test_a_whole_answer_is_captured_completely(world):
    capability, grant = world.mint()
    world.says("The dog sleeps.")
    answer = await generate(
        world, capability, "What does it do?", system_instruction="Be brief.", temperature=0.2, top_k=5,
        max_output_tokens=50, stop_sequences=["END"],
    )  # fmt: skip
    assert answer.text == "The dog sleeps." and answer.candidates[0].finish_reason == "STOP"
    assert answer.model_version == "m"
    (c,) = world.stored(grant)
    assert answer.response_id == c.completion_id
    assert [m["role"] for m in c.messages] == ["system", "user"] and c.messages[0]["content"] == "Be brief."
    assert c.requested_sampling == {"temperature": 0.2, "top_k": 5.0, "max_tokens": 50, "stop": ["END"]}
    assert c.sampling["temperature"] == 1.0 and c.sampling["max_new_tokens"] == 50 and c.sampling["stop"] == ["END"]
    assert c.dialect == "google" and c.response == {"role": "assistant", "content": "The dog sleeps."}
    usage = answer.usage_metadata
    assert usage.prompt_token_count == c.prompt_length and usage.candidates_token_count == len(c.sampled_ids)
    assert usage.total_token_count == c.prompt_length + len(c.sampled_ids) and usage.cached_content_token_count == 3
    world.check_prompts(grant)


@pytest.mark.parametrize("thoughts", [True, False])
async def test_a_stream_adds_up_to_the_whole_answer(world, thoughts):
    sample = f"<think>\nI look first.\n</think>\n\nI look 📦 at it.\n{TWO}"
    answers = []
    for i, stream in enumerate((False, True)):
        capability, grant = world.mint(f"t.s{i}")
        world.says(sample)
        config = types.ThinkingConfig(include_thoughts=thoughts)
        answers.append(said(await generate(world, capability, "go", stream, tools=[RUN], thinking_config=config)))
        (c,) = world.stored(grant)
        assert answers[-1]["id"] == {c.completion_id} and c.response["reasoning_content"] == "I look first."
        assert [i for i, _, _ in answers[-1]["calls"]] == [t["id"] for t in c.response["tool_calls"]]
    whole, streamed = answers
    for name in ("text", "thoughts", "finish"):
        assert whole[name] == streamed[name]
    assert whole["usage"][0] == streamed["usage"][0] and len(streamed["usage"]) == 1
    usage = whole["usage"][0]
    sampled = world.ids(sample)
    thoughts_end = len(world.ids("<think>\nI look first.\n</think>", end=False))
    assert (usage.thoughts_token_count, usage.candidates_token_count) == (thoughts_end, len(sampled) - thoughts_end)
    assert usage.total_token_count == usage.prompt_token_count + len(sampled)
    assert [c[1:] for c in whole["calls"]] == [c[1:] for c in streamed["calls"]]
    assert whole["thoughts"] == ("I look first." if thoughts else "")
    assert whole["calls"][0][1:] == ("run", {"command": "ls", "n": 1.0})
    assert len(whole["signatures"]) == len(streamed["signatures"]) == 3  # the text's, and each call's


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_continues_on_raw_ids(world, stream):
    capability, grant = world.mint()
    contents: list[Any] = [user("List the files.")]
    world.says(f"<think>\nI  run it.\n</think>\n\nOk.\n{CALL}")
    first = await generate(world, capability, contents, stream, tools=[RUN], system_instruction="Be careful.")
    chunks = first if stream else [first]
    (call,) = said(first)["calls"]
    contents += [c.candidates[0].content for c in chunks]
    result = types.FunctionResponse(id=call[0], name="run", response={"output": "a.txt 📄"})
    contents.append(user(types.Part(function_response=result)))
    world.says("One file.")
    second = await generate(world, capability, contents, stream, tools=[RUN], system_instruction="Be careful.")
    assert said(second)["text"] == "One file."
    one, two = world.stored(grant)
    assert two.link == "continued" and two.parent_id == one.completion_id
    assert [m["role"] for m in two.messages] == ["tool"] and two.messages[0]["content"] == "a.txt 📄"
    assert two.messages[0]["tool_call_id"] == one.response["tool_calls"][0]["id"]
    parent = world.engine.served[0].body["input_ids"] + one.sampled_ids.tolist()
    assert world.engine.served[1].body["input_ids"][: len(parent)] == parent
    world.check_prompts(grant)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_sdk_chat_continues_turn_after_turn(world, stream):
    """The SDK keeps one content per chunk, thoughts among them."""
    capability, grant = world.mint()
    config = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))
    chat = client(world, capability).chats.create(model="m", config=config)
    for i in range(3):
        world.says(f"<think>\nHm  {i}.\n</think>\n\nThe quick brown fox  jumps over {i}.")
        if stream:
            async for _ in await chat.send_message_stream(f"Say {i}"):
                pass
        else:
            await chat.send_message(f"Say {i}")
    assert [c.link for c in world.stored(grant)] == ["first", "continued", "continued"]
    world.check_prompts(grant)


async def test_automatic_function_calling_runs_through(world):
    capability, grant = world.mint()

    def run(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    world.says('<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>')
    world.says("done")
    answer = await generate(world, capability, "go", tools=[run])
    assert answer.text == "done"
    one, two = world.stored(grant)
    assert two.link == "continued" and two.messages[0]["content"] == '{"result": "ran ls"}'
    function = one.tools[0]["function"]
    assert function["name"] == "run" and function["parameters"]["properties"]["command"]["type"] == "string"


async def test_a_json_array_arrives_element_by_element(world):
    capability, grant = world.mint()
    reply = world.says("One two three four five six seven.", hold_after=6)
    path = f"/s/{capability}/v1beta/models/m:streamGenerateContent"
    body = {"contents": [{"parts": [{"text": "go"}]}]}
    async with aiohttp.ClientSession() as http, http.post(world.server.url + path, json=body) as response:
        assert response.headers["Content-Type"].startswith("application/json")
        seen = b""
        while b'"text"' not in seen or not seen.endswith(b"\n\n"):  # heartbeats are white space
            seen += await response.content.readany()
        reply.release.set()
        seen += await response.content.read()
    chunks = json.loads(seen)
    text = "".join(p["text"] for c in chunks for p in c["candidates"][0]["content"]["parts"])
    assert text == "One two three four five six seven." and len(chunks) > 2
    assert [c["candidates"][0].get("finishReason") for c in chunks][-1] == "STOP"
    assert "usageMetadata" in chunks[-1] and world.stored(grant)[0].stream


async def test_heartbeats_in_a_stream_mean_nothing(world):
    capability, _ = world.mint()
    reply = world.says("The dog sleeps.", hold_after=2)
    api = client(world, capability).models
    stream = await api.generate_content_stream(model="m", contents="go")
    metrics = world.server.service.metrics
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        while not metrics.heartbeats._value.get() >= 3:
            await world.server.service.redis_up()
        reply.release.set()
    assert said(chunks)["text"] == "The dog sleeps."


@pytest.mark.parametrize("why, code", [("engine", 503), ("revoked", 410)])
async def test_the_official_client_raises_where_a_stream_breaks_off(world, monkeypatch, why, code):
    monkeypatch.setattr(pool, "RESUME_WINDOW", 0.3)
    capability, grant = world.mint()
    world.says("The quick brown fox jumps over it.", **{"drop_after" if why == "engine" else "hold_after": 5})
    with pytest.raises(errors.APIError) as e:
        async for _ in await client(world, capability).models.generate_content_stream(model="m", contents="go"):
            if why == "revoked":
                await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    assert e.value.code == code


@pytest.mark.parametrize("sse", [True, False])
async def test_a_broken_stream_ends_without_a_finish_reason(world, sse):
    """Gemini CLI crashes on a reset."""
    capability, _ = world.mint()
    world.says("The quick brown fox jumps over it.", drop_after=5)
    world.says("", status=400)  # there is no going on at the engine either
    path = f"/s/{capability}/v1beta/models/m:streamGenerateContent" + ("?alt=sse" if sse else "")
    body = {"contents": [{"parts": [{"text": "go"}]}]}
    async with aiohttp.ClientSession() as http, http.post(world.server.url + path, json=body) as response:
        assert response.status == 200
        seen = (await response.read()).decode()
    assert "quick" in seen and "finishReason" not in seen
    assert ('data: {"error":{"code":503,' in seen) == sse  # what the official SDKs raise
    if not sse:
        with pytest.raises(ValueError):
            json.loads(seen)


async def test_a_cut_off_answer_says_so(world):
    capability, _ = world.mint()
    world.says("The quick brown fox jumps", end=False)
    answer = await generate(world, capability, "go", max_output_tokens=4)
    assert answer.candidates[0].finish_reason == "MAX_TOKENS"


async def test_an_empty_answer_has_a_part(world):
    capability, grant = world.mint()
    world.says("")
    answer = await generate(world, capability, "go")
    assert answer.text == "" and answer.candidates[0].content.parts
    world.says("more")
    await generate(world, capability, [user("go"), answer.candidates[0].content, user("on")])
    assert world.stored(grant)[1].link == "continued"


async def test_no_calls_where_the_mode_is_none(world):
    capability, grant = world.mint()
    world.says(CALL)
    mode = types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="NONE"))
    answer = await generate(world, capability, "go", tools=[RUN], tool_config=mode)
    assert answer.text == CALL and answer.function_calls is None
    assert world.stored(grant)[0].requested_sampling["tool_choice"] == {"mode": "NONE"}


async def test_images_become_placeholders(world):
    capability, grant = world.mint()
    world.says("a box")
    await generate(world, capability, [user("What is it?", types.Part.from_bytes(data=PNG, mime_type="image/png"))])
    content = world.stored(grant)[0].messages[0]["content"]
    assert content.startswith("What is it?[image image/png, ") and "not shown" in content


async def test_tokens_are_counted(world):
    capability, grant = world.mint()
    world.says("hi")
    answer = await generate(world, capability, "How many?")
    counted = await client(world, capability).models.count_tokens(model="m", contents="How many?")
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count
    path = f"/s/{capability}/v1beta/models/m:countTokens"
    inner = {"model": "models/m", "contents": [{"parts": [{"text": "How many?"}]}], "systemInstruction": "Be brief."}
    status, more = await post(world, path, {"generateContentRequest": inner})
    assert status == 200 and more["totalTokens"] > counted.total_tokens
    assert len(world.stored(grant)) == 1


async def test_models_are_listed(world):
    capability, _ = world.mint()
    api = client(world, capability).models
    (model,) = [m async for m in await api.list()]
    assert model.name == "models/policy" and model.input_token_limit == 4096
    assert "generateContent" in model.supported_actions
    for name in ("some-name", "models/some-name"):
        assert (await api.get(model=name)).name == "models/some-name"


@pytest.mark.parametrize("version", ["v1", "v1alpha", "v1beta", "v1beta1"])
async def test_the_shared_paths_know_their_dialect(world, version):
    capability, _ = world.mint()
    bare = await post(world, f"/s/{capability}/v1/models", None, "GET")
    assert "data" in bare[1]
    for path, headers in (
        (f"/s/{capability}/{version}/models", {"x-goog-api-key": "x"}),
        (f"/{version}/models?key={capability}", {}),
        (f"/{version}/models", {"x-goog-api-key": capability}),
    ):
        status, answer = await post(world, path, None, "GET", **headers)
        assert status == 200 and answer["models"][0]["name"] == "models/policy"


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models/m:generateContent",
        "/v1/models/m:generateContent",
        "/v1alpha/models/models%2Fm:generateContent",
        "/v1beta/models/m%3AgenerateContent",
        "/v1beta/tunedModels/m:generateContent",
        "/v1beta1/publishers/google/models/m:generateContent",
        "/v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent",
        "/v1beta/models/m:generateContent?key=ignored",
    ],
)
async def test_every_form_of_the_path(world, path):
    capability, _ = world.mint()
    world.says("hi")
    status, answer = await post(world, f"/s/{capability}{path}", {"contents": {"parts": {"text": "go"}}})
    assert status == 200 and answer["modelVersion"] == "m"


async def test_names_may_have_colons_and_slashes(world):
    capability, _ = world.mint()
    world.says("hi")
    path = f"/s/{capability}/v1beta/models/org/qwen:7b:generateContent"
    assert (await post(world, path, {"contents": "go"}))[1]["modelVersion"] == "org/qwen:7b"


@pytest.mark.parametrize(
    "body",
    [
        {"contents": [{"parts": [{"text": "go"}]}], "generationConfig": {"maxOutputTokens": 9, "topK": 3}},
        {"contents": [{"parts": [{"text": "go"}]}], "generation_config": {"max_output_tokens": 9, "top_k": 3}},
        {"contents": [{"parts": [{"text": "go", "thought": None}]}], "generationConfig": {"max_output_tokens": 9}},
    ],
)
async def test_both_spellings_of_names(world, body):
    capability, grant = world.mint()
    world.says("hi")
    assert (await post(world, f"/s/{capability}/v1beta/models/m:generateContent", body))[0] == 200
    assert world.stored(grant)[0].sampling["max_new_tokens"] == 9


@pytest.mark.parametrize(
    "capability, status, name", [("wrong", 401, "UNAUTHENTICATED"), ("ended", 410, "FAILED_PRECONDITION")]
)
async def test_strangers_and_ended_sessions(world, capability, status, name):
    ended, grant = world.mint()
    world.store.revoke(grant.attempt_id)
    with pytest.raises(errors.ClientError) as e:
        await generate(world, ended if capability == "ended" else capability, "go")
    assert e.value.code == status and e.value.status == name
    assert world.engine.served == []


async def test_limits_are_a_denied_permission(world):
    capability, _ = world.mint(max_turns=1)
    world.says("hi")
    await generate(world, capability, "go")
    with pytest.raises(errors.ClientError) as e:
        await generate(world, capability, "go on")
    assert e.value.code == 403 and e.value.status == "PERMISSION_DENIED"
    assert e.value.details["error"]["details"][0]["reason"] == "TURN_LIMIT"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_an_overflow(world, stream):
    capability, _ = world.mint()
    with pytest.raises(errors.ClientError) as e:
        await generate(world, capability, "word " * 5000, stream)
    assert e.value.code == 400 and e.value.status == "INVALID_ARGUMENT"
    assert e.value.message.startswith("The input token count (")
    assert e.value.message.endswith(") exceeds the maximum number of tokens allowed (4096).")


async def test_a_proxy_that_is_leaving_is_unavailable(world):
    capability, _ = world.mint()
    world.server.service.draining = True
    status, answer = await post(world, f"/s/{capability}/v1beta/models/m:streamGenerateContent", {"contents": "go"})
    assert status == 503 and answer["error"]["status"] == "UNAVAILABLE"
    assert answer["error"]["details"][-1]["retryDelay"] == "2s"


@pytest.mark.parametrize("verb", ["embedContent", "batchEmbedContents", "predict"])
async def test_other_methods_are_unknown(world, verb):
    capability, _ = world.mint()
    status, answer = await post(world, f"/s/{capability}/v1beta/models/m:{verb}", {})
    assert status == 404 and answer["error"]["status"] == "NOT_FOUND"
    assert world.engine.served == []
