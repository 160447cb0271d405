// Anthropic's client of Node: messages, streams, a tool loop, counting, an error.

import Anthropic from "@anthropic-ai/sdk";
import { KEY, MODEL, URL, WEATHER, gathered, refused, run, same } from "./cases.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const about = { model: MODEL, max_tokens: 200 };
const messages = [{ role: "user", content: "hello" }];
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather of a city.", input_schema }];

await run({
  whole: async () => {
    const said = await client.messages.create({ ...about, messages });
    same([said.content[0].text, said.stop_reason], ["you said hello", "end_turn"]);
  },
  stream: async () => {
    const stream = client.messages.stream({ ...about, messages });
    same(await gathered(stream, (each) => each.delta?.text), "you said hello");
    same((await stream.finalMessage()).stop_reason, "end_turn");
  },
  tools: async () => {
    const asked = [{ role: "user", content: "weather in Paris?" }];
    const first = await client.messages.stream({ ...about, messages: asked, tools }).finalMessage();
    const call = first.content.find((each) => each.type === "tool_use");
    same([first.stop_reason, call.input], ["tool_use", { city: "Paris" }]);
    asked.push({ role: "assistant", content: first.content });
    asked.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "18 degrees" }] });
    same((await client.messages.create({ ...about, messages: asked, tools })).content[0].text, WEATHER);
  },
  count: async () => {
    const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages });
    same((await client.messages.create({ ...about, messages })).usage.input_tokens <= input_tokens, true);
  },
  error: async () => {
    await refused(() => client.messages.create({ ...about, messages: [] }), (error) => error instanceof Anthropic.BadRequestError);
  },
});
