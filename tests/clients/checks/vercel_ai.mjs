import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, streamText, tool } from 'ai';
import { City, KEY, MAX_TOKENS, MODEL, QUESTION, URL, collect, joined, oneCall, report, same } from './common.mjs';

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const providers = {
  'openai-compatible': createOpenAICompatible({
    name: 'cluster', baseURL: `${URL}/v1`, apiKey: KEY, supportsStructuredOutputs: true,
  })(MODEL),
  'openai (responses)': openai(MODEL),
  'openai (chat)': openai.chat(MODEL),
  anthropic: createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY })(MODEL),
};
const tools = { save_city: tool({ description: 'Save a city', inputSchema: City }) };

async function each(check) {
  for (const [name, model] of Object.entries(providers)) {
    const ask = { model, prompt: QUESTION, temperature: 0, maxRetries: 0 };
    try {
      await check(ask);
    } catch (error) {
      error.message = `${name}: ${error.message}`;
      throw error;
    }
  }
}

await report('ai', {
  async chat() {
    await each(async (ask) => same((await generateText({ ...ask, maxOutputTokens: MAX_TOKENS })).text));
    return `providers ${Object.keys(providers).join(', ')}`;
  },
  async streaming() {
    await each(async (ask) => joined(await collect(streamText({ ...ask, maxOutputTokens: MAX_TOKENS }).textStream)));
  },
  async structured() {
    const output = Output.object({ schema: City });
    await each(async (ask) => City.parse((await generateText({ ...ask, output, maxOutputTokens: 60 })).output));
    await each(async (ask) => {
      const stream = streamText({ ...ask, output, maxOutputTokens: 60 });
      City.parse((await collect(stream.partialOutputStream)).at(-1));
    });
  },
  async tools() {
    const forced = { tools, toolChoice: 'required', maxOutputTokens: 60 };
    const calls = (found) => found.map((call) => ({ name: call.toolName, input: call.input }));
    await each(async (ask) => oneCall(calls((await generateText({ ...ask, ...forced })).toolCalls)));
    await each(async (ask) => oneCall(calls(await streamText({ ...ask, ...forced }).toolCalls)));
  },
});
