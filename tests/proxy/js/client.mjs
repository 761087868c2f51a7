// Conversations through one official SDK, each as a program of that SDK's users would hold it, one after the other.
//
// stdin: {"sdk", "jobs": [{"base", "stream", "retries", "maxTokens", "system", "steps": ["user text" | ["result of a call", …]]}]}
// stdout: JSON lines: {"at": "status", "status": 200} for each HTTP answer, {"at": "delta"} for each piece of a stream, and
// {"at": "end", "turns": [...], "error": {...} | null} for each job. A turn is what the SDK's types hold:
// {"text", "reasoning", "calls": [{"id", "name", "arguments"}], "finish", "usage", "final", "deltas"}.
// It is run with --eval in the folder of the packages, so that imports are found there.
const tell = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const { sdk, jobs } = JSON.parse(await new Response(process.stdin).text());

globalThis.AI_SDK_LOG_WARNINGS = false; // they would go to stdout

// Every SDK fetches through this: the test sees each try.
const real = globalThis.fetch;
globalThis.fetch = async (...args) => {
  const response = await real(...args);
  tell({ at: "status", status: response.status });
  return response;
};

const PARAMETERS = { type: "object", properties: { command: { type: "string" } } };
const TOOLS = ["run", "look"].map((name) => ({ name, description: `To ${name}.`, parameters: PARAMETERS }));
const joined = (parts) => parts.join("");

async function openai(job) {
  const { default: OpenAI } = await import("openai");
  return new OpenAI({ baseURL: `${job.base}/v1`, apiKey: "x", maxRetries: job.retries });
}

async function openaiChat(job) {
  const client = await openai(job);
  const messages = [{ role: "system", content: job.system }];
  const tools = TOOLS.map((t) => ({ type: "function", function: t }));
  let calls = [];
  return async (step) => {
    if (Array.isArray(step)) {
      step.forEach((content, i) => messages.push({ role: "tool", tool_call_id: calls[i].id, content }));
    } else messages.push({ role: "user", content: step });
    const request = { model: "m", messages, tools, max_completion_tokens: job.maxTokens };
    const deltas = { text: "", reasoning: "" };
    let final;
    if (job.stream) {
      const stream = client.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
      for await (const chunk of stream) {
        const delta = chunk.choices[0]?.delta ?? {};
        deltas.text += delta.content ?? "";
        deltas.reasoning += delta.reasoning_content ?? "";
        tell({ at: "delta" });
      }
      final = await stream.finalChatCompletion();
    } else final = await client.chat.completions.create(request);
    const { message, finish_reason } = final.choices[0];
    // The helper keeps only the last piece of a field that it doesn't know.
    if (job.stream && message.reasoning_content) message.reasoning_content = deltas.reasoning;
    messages.push(message);
    calls = message.tool_calls ?? [];
    const u = final.usage;
    return {
      text: message.content ?? "",
      reasoning: message.reasoning_content ?? "",
      calls: calls.map((c) => ({ id: c.id, name: c.function.name, arguments: JSON.parse(c.function.arguments) })),
      finish: finish_reason,
      usage: [u.prompt_tokens, u.prompt_tokens_details.cached_tokens, u.completion_tokens, u.completion_tokens_details.reasoning_tokens],
      final,
      deltas,
    };
  };
}

async function openaiResponses(job) {
  const client = await openai(job);
  const input = [];
  const tools = TOOLS.map((t) => ({ type: "function", strict: false, ...t }));
  let calls = [];
  return async (step) => {
    if (Array.isArray(step)) {
      step.forEach((output, i) => input.push({ type: "function_call_output", call_id: calls[i].call_id, output }));
    } else input.push({ role: "user", content: step });
    const include = ["reasoning.encrypted_content"];
    const request = { model: "m", instructions: job.system, input, tools, store: false, include, max_output_tokens: job.maxTokens };
    const deltas = { text: "", reasoning: "" };
    let final;
    if (job.stream) {
      const stream = client.responses.stream(request);
      for await (const e of stream) {
        if (e.type === "response.output_text.delta") deltas.text += e.delta;
        if (e.type === "response.reasoning_text.delta") deltas.reasoning += e.delta;
        if (e.type.endsWith(".delta")) tell({ at: "delta" });
      }
      final = await stream.finalResponse();
    } else final = await client.responses.create(request);
    input.push(...final.output);
    calls = final.output.filter((i) => i.type === "function_call");
    const thoughts = final.output.filter((i) => i.type === "reasoning").flatMap((i) => i.content);
    const u = final.usage;
    return {
      text: final.output_text,
      reasoning: joined(thoughts.map((c) => c.text)),
      calls: calls.map((c) => ({ id: c.call_id, name: c.name, arguments: JSON.parse(c.arguments) })),
      finish: final.incomplete_details?.reason ?? (calls.length ? "tool_calls" : final.status),
      usage: [u.input_tokens, u.input_tokens_details.cached_tokens, u.output_tokens, u.output_tokens_details.reasoning_tokens],
      final,
      deltas,
    };
  };
}

async function anthropic(job) {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: job.base, apiKey: "x", maxRetries: job.retries });
  const messages = [];
  const tools = TOOLS.map(({ parameters, ...t }) => ({ ...t, input_schema: parameters }));
  let calls = [];
  return async (step) => {
    const result = (content, i) => ({ type: "tool_result", tool_use_id: calls[i].id, content });
    messages.push({ role: "user", content: Array.isArray(step) ? step.map(result) : step });
    const request = { model: "m", system: job.system, messages, tools, max_tokens: job.maxTokens ?? 8000 };
    const deltas = { text: "", reasoning: "" };
    let final;
    if (job.stream) {
      const stream = client.messages.stream(request);
      stream.on("text", (t) => (deltas.text += t)).on("thinking", (t) => (deltas.reasoning += t));
      for await (const e of stream) if (e.type === "content_block_delta") tell({ at: "delta" });
      final = await stream.finalMessage();
    } else final = await client.messages.create(request);
    messages.push({ role: final.role, content: final.content });
    const of = (type) => final.content.filter((b) => b.type === type);
    calls = of("tool_use");
    const u = final.usage;
    return {
      text: joined(of("text").map((b) => b.text)),
      reasoning: joined(of("thinking").map((b) => b.thinking)),
      calls: calls.map((b) => ({ id: b.id, name: b.name, arguments: b.input })),
      finish: final.stop_reason,
      usage: [u.input_tokens + u.cache_read_input_tokens, u.cache_read_input_tokens, u.output_tokens, u.output_tokens_details.thinking_tokens],
      final,
      deltas,
    };
  };
}

async function google(job) {
  const { GoogleGenAI } = await import("@google/genai");
  const retryOptions = job.retries ? { attempts: job.retries + 1, initialDelay: 0.2 } : undefined;
  const client = new GoogleGenAI({ apiKey: "x", httpOptions: { baseUrl: job.base, retryOptions } });
  const contents = [];
  const tools = [{ functionDeclarations: TOOLS.map(({ parameters, ...t }) => ({ ...t, parametersJsonSchema: parameters })) }];
  let calls = [];
  return async (step) => {
    const result = (output, i) => ({ functionResponse: { id: calls[i].id, name: calls[i].name, response: { output } } });
    contents.push({ role: "user", parts: Array.isArray(step) ? step.map(result) : [{ text: step }] });
    const config = { systemInstruction: job.system, tools, maxOutputTokens: job.maxTokens, thinkingConfig: { includeThoughts: true } };
    const request = { model: "m", contents, config };
    const chunks = [];
    if (job.stream) {
      for await (const chunk of await client.models.generateContentStream(request)) {
        chunks.push(chunk);
        tell({ at: "delta" });
      }
    } else chunks.push(await client.models.generateContent(request));
    const parts = chunks.flatMap((c) => c.candidates[0].content.parts);
    contents.push(...chunks.map((c) => c.candidates[0].content));
    calls = chunks.flatMap((c) => c.functionCalls ?? []);
    const text = joined(parts.filter((p) => !p.thought).map((p) => p.text ?? ""));
    const reasoning = joined(parts.filter((p) => p.thought).map((p) => p.text));
    const last = chunks.at(-1);
    const { candidates, ...about } = last;
    const u = last.usageMetadata;
    return {
      text,
      reasoning,
      calls: calls.map((c) => ({ id: c.id, name: c.name, arguments: c.args })),
      finish: last.candidates[0].finishReason ?? null,
      usage: u && [u.promptTokenCount, u.cachedContentTokenCount, u.candidatesTokenCount + u.thoughtsTokenCount, u.thoughtsTokenCount],
      final: { ...about, candidate: { ...candidates[0], content: null } }, // it has no type for a stream's sum
      deltas: { text: joined(chunks.map((c) => (c.candidates[0].content.parts.some((p) => !p.thought && p.text) ? c.text : ""))), reasoning },
    };
  };
}

// Vercel's SDK: one interface, three of the dialects. opencode has the generation before in it, which is installed as six-….
const older = sdk.startsWith("opencode");
const generation = (name) => import(older ? name.replace(/^(@ai-sdk\/)?/, "six-") : name);

async function vercel(job, model, providerOptions) {
  const { generateText, streamText, jsonSchema } = await generation("ai");
  const tools = Object.fromEntries(
    TOOLS.map((t) => [t.name, { description: t.description, inputSchema: jsonSchema(t.parameters) }]),
  );
  const messages = [];
  let calls = [];
  return async (step) => {
    const result = (value, i) => ({ type: "tool-result", toolCallId: calls[i].toolCallId, toolName: calls[i].toolName, output: { type: "text", value } });
    messages.push(Array.isArray(step) ? { role: "tool", content: step.map(result) } : { role: "user", content: step });
    const request = { model, [older ? "system" : "instructions"]: job.system, messages, tools, maxRetries: job.retries, maxOutputTokens: job.maxTokens, providerOptions };
    const deltas = { text: "", reasoning: "" };
    let answer;
    if (job.stream) {
      let failed;
      const stream = streamText({ ...request, onError: ({ error }) => (failed ??= error) });
      for await (const part of stream.fullStream) {
        if (part.type === "text-delta") deltas.text += part.text;
        if (part.type === "reasoning-delta") deltas.reasoning += part.text;
        if (part.type.endsWith("-delta")) tell({ at: "delta" });
      }
      if (failed) throw failed;
      answer = {};
      for (const name of ["text", "reasoningText", "toolCalls", "finishReason", "usage", "response"]) answer[name] = await stream[name];
    } else answer = await generateText(request);
    messages.push(...answer.response.messages);
    calls = answer.toolCalls;
    const u = answer.usage;
    return {
      text: answer.text,
      reasoning: answer.reasoningText ?? "",
      calls: calls.map((c) => ({ id: c.toolCallId, name: c.toolName, arguments: c.input })),
      finish: answer.finishReason,
      usage: [u.inputTokens, u.inputTokenDetails.cacheReadTokens ?? null, u.outputTokens, u.outputTokenDetails.reasoningTokens ?? null],
      final: answer.response.messages,
      deltas,
    };
  };
}

async function vercelChat(job) {
  const { createOpenAICompatible } = await generation("@ai-sdk/openai-compatible");
  return vercel(job, createOpenAICompatible({ name: "polar", baseURL: `${job.base}/v1`, apiKey: "x", includeUsage: true })("m"));
}

async function vercelResponses(job) {
  const { createOpenAI } = await generation("@ai-sdk/openai");
  const openai = { store: job.store ?? false, include: ["reasoning.encrypted_content"], forceReasoning: true, reasoningSummary: job.summary };
  return vercel(job, createOpenAI({ baseURL: `${job.base}/v1`, apiKey: "x" }).responses("m"), { openai });
}

async function vercelAnthropic(job) {
  const { createAnthropic } = await generation("@ai-sdk/anthropic");
  return vercel(job, createAnthropic({ baseURL: `${job.base}/v1`, apiKey: "x" })("m"));
}

const SDKS = {
  openaiChat,
  openaiResponses,
  anthropic,
  google,
  vercelChat,
  vercelResponses,
  vercelAnthropic,
  opencodeChat: vercelChat,
  opencodeResponses: vercelResponses,
  opencodeAnthropic: vercelAnthropic,
};

// What the program would find in a `catch`; Vercel's SDK wraps the last of several tries.
function caught(e) {
  const inner = e.lastError ?? e;
  return {
    class: e.constructor.name,
    inner: inner.constructor.name,
    message: String(inner.message),
    status: inner.status ?? inner.statusCode ?? null,
    retryable: inner.isRetryable ?? null,
    body: inner.error ?? inner.responseBody ?? null,
  };
}

for (const job of jobs) {
  const turns = [];
  let error = null;
  try {
    const turn = await SDKS[sdk](job);
    for (const step of job.steps) turns.push(await turn(step));
  } catch (e) {
    error = caught(e);
  }
  tell({ at: "end", turns, error });
}
