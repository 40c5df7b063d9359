import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { CITY, City, KEY, MAX_TOKENS, MODEL, QUESTION, URL, collect, joined, oneCall, report, same } from './common.mjs';

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const ask = { model: MODEL, messages: [{ role: 'user', content: QUESTION }], temperature: 0 };
const respond = { model: MODEL, input: QUESTION, temperature: 0 };
const tools = [{ type: 'function', function: { name: 'save_city', description: 'Save a city', parameters: CITY } }];

await report('openai', {
  async chat() {
    const answer = await client.chat.completions.create({ ...ask, max_tokens: MAX_TOKENS });
    same(answer.choices[0].message.content);
    same((await client.responses.create({ ...respond, max_output_tokens: MAX_TOKENS })).output_text);
    return 'chat, responses';
  },
  async streaming() {
    const chunks = await collect(await client.chat.completions.create({ ...ask, max_tokens: MAX_TOKENS, stream: true }));
    joined(chunks.map((chunk) => chunk.choices[0]?.delta.content));
    const events = await collect(client.responses.stream({ ...respond, max_output_tokens: MAX_TOKENS }));
    joined(events.filter((event) => event.type === 'response.output_text.delta').map((event) => event.delta));
  },
  async structured() {
    const answer = await client.chat.completions.parse({ ...ask, response_format: zodResponseFormat(City, 'city') });
    City.parse(answer.choices[0].message.parsed);
    City.parse((await client.responses.parse({ ...respond, text: { format: zodTextFormat(City, 'city') } })).output_parsed);
  },
  async tools() {
    const answer = await client.chat.completions.create({ ...ask, tools, tool_choice: 'required' });
    const call = answer.choices[0].message.tool_calls[0].function;
    oneCall([{ name: call.name, input: call.arguments }]);
    const runner = client.chat.completions.stream({ ...ask, tools, tool_choice: 'required' });
    const streamed = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
    oneCall([{ name: streamed.name, input: streamed.arguments }]);
  },
});
