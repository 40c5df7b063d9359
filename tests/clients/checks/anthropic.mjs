import Anthropic from '@anthropic-ai/sdk';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { CITY, City, KEY, MAX_TOKENS, MODEL, QUESTION, URL, collect, joined, oneCall, report, same } from './common.mjs';

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const ask = { model: MODEL, messages: [{ role: 'user', content: QUESTION }], temperature: 0 };
const forced = {
  tools: [{ name: 'save_city', description: 'Save a city', input_schema: CITY }],
  tool_choice: { type: 'any' },
  max_tokens: 60,
};

await report('@anthropic-ai/sdk', {
  async chat() {
    same((await client.messages.create({ ...ask, max_tokens: MAX_TOKENS })).content[0].text);
  },
  async streaming() {
    const events = await collect(client.messages.stream({ ...ask, max_tokens: MAX_TOKENS }));
    joined(events.filter((event) => event.type === 'content_block_delta').map((event) => event.delta.text));
  },
  async structured() {
    const answer = await client.messages.parse({ ...ask, max_tokens: 60, output_config: { format: zodOutputFormat(City) } });
    City.parse(answer.parsed_output);
  },
  async tools() {
    oneCall((await client.messages.create({ ...ask, ...forced })).content.filter((block) => block.type === 'tool_use'));
    const message = await client.messages.stream({ ...ask, ...forced }).finalMessage();
    oneCall(message.content.filter((block) => block.type === 'tool_use'));
  },
});
