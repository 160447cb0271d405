// The AI SDK's createOpenAI: texts, streams, objects and tool loops, through Responses with and without `store`, and chat.

import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, PERSON, URL, WEATHER, gathered, run, same } from "./cases.mjs";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `18 degrees in ${city}`,
  }),
};

async function looped(model, store) {
  const providerOptions = store === undefined ? {} : { openai: { store } };
  const prompt = "weather in Paris?";
  const said = await generateText({ model, prompt, tools, stopWhen: stepCountIs(4), maxRetries: 0, providerOptions });
  same([said.text, said.steps.length], [WEATHER, 2]);
}

await run({
  responses: async () => {
    same((await generateText({ model: openai(MODEL), prompt: "hello", maxRetries: 0 })).text, "you said hello");
    same(await gathered(streamText({ model: openai(MODEL), prompt: "hello" }).textStream, (each) => each), "you said hello");
  },
  loop: () => looped(openai(MODEL)),
  loop_with_store: () => looped(openai(MODEL), true),
  loop_without_store: () => looped(openai(MODEL), false),
  chat: async () => {
    const model = openai.chat(MODEL);
    same(await gathered(streamText({ model, prompt: "hello" }).textStream, (each) => each), "you said hello");
    await looped(model);
  },
  object: async () => {
    const output = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });
    for (const model of [openai(MODEL), openai.chat(MODEL)]) {
      const said = await generateText({ model, prompt: "Who is Ada?", output, maxRetries: 0 });
      same(said.output, PERSON);
    }
  },
});
