import { Ollama } from 'ollama';
import { z } from 'zod';
import { CITY, City, MAX_TOKENS, MODEL, QUESTION, URL, collect, joined, oneCall, report, same } from './common.mjs';

const client = new Ollama({ host: URL });
const messages = [{ role: 'user', content: QUESTION }];
const short = { model: MODEL, options: { temperature: 0, num_predict: MAX_TOKENS } };
const long = { model: MODEL, options: { temperature: 0, num_predict: 60 } };
const tools = [{ type: 'function', function: { name: 'save_city', description: 'Save a city', parameters: CITY } }];
// Ollama's API cannot force a call: the model follows an example.
const example = [
  { role: 'user', content: 'Save Rome.' },
  { role: 'assistant', content: '', tool_calls: [{ function: { name: 'save_city', arguments: { name: 'Rome', large: true } } }] },
  { role: 'user', content: 'Save Paris.' },
];
const inputs = (message) => (message.tool_calls ?? []).map(({ function: call }) => ({ name: call.name, input: call.arguments }));

await report('ollama', {
  async chat() {
    same((await client.chat({ ...short, messages })).message.content);
    same((await client.generate({ ...short, prompt: QUESTION })).response);
  },
  async streaming() {
    const parts = await collect(await client.chat({ ...short, messages, stream: true }));
    joined(parts.map((part) => part.message.content));
  },
  async structured() {
    const answer = await client.chat({ ...long, messages, format: z.toJSONSchema(City) });
    City.parse(JSON.parse(answer.message.content));
  },
  async tools() {
    oneCall(inputs((await client.chat({ ...long, messages: example, tools })).message));
    const parts = await collect(await client.chat({ ...long, messages: example, tools, stream: true }));
    oneCall(parts.flatMap((part) => inputs(part.message)));
  },
});
