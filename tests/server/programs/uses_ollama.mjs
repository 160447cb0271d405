// Ollama's client of Node: chat, generate, streams, a tool loop, a schema, models, an error.

import { Ollama } from "ollama";
import { MODEL, PERSON, URL, WEATHER, gathered, refused, run, same } from "./cases.mjs";

const client = new Ollama({ host: URL });
const messages = [{ role: "user", content: "hello" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather of a city.", parameters } }];

await run({
  chat: async () => {
    same((await client.chat({ model: MODEL, messages })).message.content, "you said hello");
    const stream = await client.chat({ model: MODEL, messages, stream: true });
    same(await gathered(stream, (each) => each.message.content), "you said hello");
  },
  generate: async () => {
    same((await client.generate({ model: MODEL, prompt: "hello" })).response, "you said hello");
  },
  tools: async () => {
    const asked = [{ role: "user", content: "weather in Paris?" }];
    const first = await client.chat({ model: MODEL, messages: asked, tools });
    same(first.message.tool_calls[0].function, { name: "get_weather", arguments: { city: "Paris" } });
    asked.push(first.message, { role: "tool", tool_name: "get_weather", content: "18 degrees" });
    same((await client.chat({ model: MODEL, messages: asked, tools })).message.content, WEATHER);
  },
  schema: async () => {
    const properties = { name: { type: "string" }, age: { type: "integer" } };
    const format = { type: "object", properties, required: ["name", "age"] };
    const said = await client.chat({ model: MODEL, messages: [{ role: "user", content: "Who is Ada?" }], format });
    same(JSON.parse(said.message.content), PERSON);
  },
  models: async () => {
    same((await client.list()).models.map((each) => each.name.split(":")[0]), [MODEL]);
    same((await client.show({ model: MODEL })).capabilities.includes("completion"), true);
  },
  error: async () => {
    await refused(() => client.chat({ model: MODEL, messages, options: { temperature: -5 } }), (error) => /temperature/.test(error.message));
  },
});
