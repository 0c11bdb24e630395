// `ai` (Vercel's SDK): its tool loop, over the providers that people use with vLLM.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, ROUNDS, SYSTEM, TASKS, main } from "./conversation.mjs";

// With `store`, its default, it replays the ids of answers instead of the answers: vLLM refuses these.
const providerOptions = { openai: { store: false } };

const talk = (modelAt) => async (url, stream, desk) => {
  const read = tool({
    description: "Read a file.",
    inputSchema: z.object({ path: z.string(), line: z.int(), deep: z.boolean() }),
    execute: async (input) => desk.read(input),
  });
  const messages = [];
  for (const task of TASKS) {
    messages.push({ role: "user", content: task });
    const request = { model: modelAt(url), system: SYSTEM, messages, tools: { read }, maxRetries: 0, providerOptions };
    const running = (stream ? streamText : generateText)({ ...request, stopWhen: stepCountIs(ROUNDS) });
    const result = stream ? running : await running;
    if (stream) await result.consumeStream({ onError: (error) => Promise.reject(error) });
    messages.push(...(await result.response).messages);
    desk.texts.push(await result.text);
  }
};

await main({
  compatible: talk((baseURL) => createOpenAICompatible({ name: "vllm", baseURL, apiKey: "x" })(MODEL)),
  chat: talk((baseURL) => createOpenAI({ baseURL, apiKey: "x" }).chat(MODEL)),
  responses: talk((baseURL) => createOpenAI({ baseURL, apiKey: "x" }).responses(MODEL)),
  messages: talk((baseURL) => createAnthropic({ baseURL, apiKey: "x" })(MODEL)),
});
