// OpenAI's client of Node: chat completions and Responses, streams, tool loops, schemas, errors, a disconnect.

import OpenAI from "openai";
import { KEY, MODEL, PERSON, URL, WEATHER, gathered, refused, run, same } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

await run({
  whole: async () => {
    const said = await client.chat.completions.create({ model: MODEL, messages });
    same(said.choices[0].message.content, "you said hello");
  },
  stream: async () => {
    const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true });
    same(await gathered(stream, (each) => each.choices[0]?.delta.content), "you said hello");
  },
  run_tools: async () => {
    const get_weather = { name: "get_weather", parameters, parse: JSON.parse, function: ({ city }) => `18 degrees in ${city}` };
    const asked = [{ role: "user", content: "weather in Paris?" }];
    const runner = client.chat.completions.runTools({ model: MODEL, messages: asked, tools: [{ type: "function", function: get_weather }] });
    same(await runner.finalContent(), WEATHER);
  },
  schema: async () => {
    const said = await client.chat.completions.create({
      model: MODEL,
      messages: [{ role: "user", content: "Who is Ada?" }],
      response_format: { type: "json_schema", json_schema: { name: "person", schema: SCHEMA, strict: true } },
    });
    same(JSON.parse(said.choices[0].message.content), PERSON);
  },
  responses: async () => {
    const stream = client.responses.stream({ model: MODEL, input: "hello" });
    same(await gathered(stream, (each) => (each.type === "response.output_text.delta" ? each.delta : "")), "you said hello");
    const first = await stream.finalResponse();
    same(first.output_text, "you said hello");
    const next = await client.responses.create({ model: MODEL, input: "again", previous_response_id: first.id });
    same(next.output_text, "you said again");
  },
  error: async () => {
    const ask = () => client.chat.completions.create({ model: MODEL, messages, temperature: 200 });
    await refused(ask, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  },
  disconnect: async () => {
    const stream = await client.chat.completions.create({ model: MODEL, messages: [{ role: "user", content: "long" }], stream: true });
    for await (const _ of stream) break;
    same((await client.models.list()).data[0].id, MODEL);
  },
});
