// `openai`: agents as its documentation has them.

import OpenAI from "openai";
import { MODEL, ROUNDS, SYSTEM, TASKS, main } from "./conversation.mjs";

const parameters = {
  type: "object",
  properties: { path: { type: "string" }, line: { type: "integer" }, deep: { type: "boolean" } },
  required: ["path", "line", "deep"],
  additionalProperties: false,
};
const definition = { name: "read", description: "Read a file.", parameters };
const client = (baseURL) => new OpenAI({ baseURL, apiKey: "x", maxRetries: 0 });

async function chat(url, stream, desk) {
  const messages = [{ role: "system", content: SYSTEM }];
  for (const task of TASKS) {
    messages.push({ role: "user", content: task });
    for (let round = 0; round < ROUNDS; round++) {
      const request = { model: MODEL, messages, tools: [{ type: "function", function: definition }] };
      const api = client(url).chat.completions;
      const answer = stream ? await api.stream(request).finalChatCompletion() : await api.create(request);
      const message = answer.choices[0].message;
      messages.push(message);
      for (const call of message.tool_calls ?? []) {
        const content = desk.read(JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
      if (!message.tool_calls?.length) {
        desk.texts.push(message.content);
        break;
      }
    }
  }
}

async function responses(url, stream, desk) {
  const input = [];
  for (const task of TASKS) {
    input.push({ role: "user", content: task });
    for (let round = 0; round < ROUNDS; round++) {
      const tools = [{ type: "function", ...definition, strict: true }];
      const request = { model: MODEL, instructions: SYSTEM, input, tools };
      const api = client(url).responses;
      const answer = stream ? await api.stream(request).finalResponse() : await api.create(request);
      input.push(...answer.output);
      const calls = answer.output.filter((item) => item.type === "function_call");
      for (const call of calls) {
        const output = desk.read(JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
      if (!calls.length) {
        desk.texts.push(answer.output_text);
        break;
      }
    }
  }
}

await main({ chat, responses });
