// The tool loops of the SDKs themselves: the SDK calls the function, sends its result and asks on, until there is no call.
//
// stdin: {"sdk", "jobs": [{"base", "stream", "retries", "steps": ["user text"]}]}
// stdout: JSON lines, {"at": "end", "turns": ["the final text"], "error": "…" | null} for each job. See client.mjs.
const { sdk, jobs } = JSON.parse(await new Response(process.stdin).text());

const name = "run";
const description = "Run a command.";
const parameters = { type: "object", properties: { command: { type: "string" } } };
const run = async ({ command }) => `ran ${command}`;

async function openaiChat({ base, stream, steps }) {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "x", maxRetries: 0 });
  const tools = [{ type: "function", function: { name, description, parameters, parse: JSON.parse, function: run } }];
  return client.chat.completions.runTools({ model: "m", messages: [{ role: "user", content: steps[0] }], tools, stream }).finalContent();
}

async function anthropic({ base, stream, steps }) {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: base, apiKey: "x", maxRetries: 0 });
  const tools = [{ name, description, input_schema: parameters, parse: (x) => x, run }];
  const messages = [{ role: "user", content: steps[0] }];
  const final = await client.beta.messages.toolRunner({ model: "m", max_tokens: 400, messages, tools, stream });
  return final.content.map((b) => b.text ?? "").join("");
}

async function google({ base, stream, steps }) {
  const { GoogleGenAI } = await import("@google/genai");
  const { models } = new GoogleGenAI({ apiKey: "x", httpOptions: { baseUrl: base } });
  const tool = {
    tool: async () => ({ functionDeclarations: [{ name, description, parametersJsonSchema: parameters }] }),
    callTool: async (calls) =>
      Promise.all(calls.map(async (c) => ({ functionResponse: { id: c.id, name: c.name, response: { output: await run(c.args) } } }))),
  };
  const request = { model: "m", contents: steps[0], config: { tools: [tool] } };
  if (!stream) return (await models.generateContent(request)).text;
  let text = "";
  for await (const chunk of await models.generateContentStream(request)) {
    const called = chunk.candidates?.[0].content.parts.some((p) => p.functionCall || p.functionResponse);
    text = called ? "" : text + (chunk.text ?? "");
  }
  return text;
}

async function vercel({ stream, steps }, model, providerOptions) {
  const { generateText, streamText, jsonSchema, isStepCount } = await import("ai");
  const tools = { run: { description, inputSchema: jsonSchema(parameters), execute: run } };
  const request = { model, prompt: steps[0], tools, stopWhen: isStepCount(5), maxRetries: 0, providerOptions };
  return stream ? streamText(request).text : (await generateText(request)).text;
}

async function vercelChat(job) {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  return vercel(job, createOpenAICompatible({ name: "polar", baseURL: `${job.base}/v1`, apiKey: "x" })("m"));
}

async function vercelResponses(job) {
  const { createOpenAI } = await import("@ai-sdk/openai");
  return vercel(job, createOpenAI({ baseURL: `${job.base}/v1`, apiKey: "x" }).responses("m"), { openai: { store: false } });
}

async function vercelAnthropic(job) {
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  return vercel(job, createAnthropic({ baseURL: `${job.base}/v1`, apiKey: "x" })("m"));
}

const LOOPS = { openaiChat, anthropic, google, vercelChat, vercelResponses, vercelAnthropic };
for (const job of jobs) {
  let error = null;
  const turns = [];
  try {
    turns.push(await LOOPS[sdk](job));
  } catch (e) {
    error = `${e.constructor.name}: ${e.message}`;
  }
  console.log(JSON.stringify({ at: "end", turns, error }));
}
