// What the checks of the npm clients share: see common.py.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { z } from 'zod';

export const URL = process.env.GATEWAY_URL;
export const MODEL = 'qwen';
export const EXPECTED = process.env.EXPECTED;
export const QUESTION = 'Why is the sky blue?';
export const MAX_TOKENS = 12;
export const KEY = 'none';
export const City = z.object({ name: z.enum(['Paris', 'Rome', 'Oslo']), large: z.boolean() });
export const CITY = {
  type: 'object',
  properties: { name: { type: 'string', enum: ['Paris', 'Rome', 'Oslo'] }, large: { type: 'boolean' } },
  required: ['name', 'large'],
  additionalProperties: false,
};

export function same(text) {
  assert.equal(text, EXPECTED);
}

export function joined(pieces) {
  const found = pieces.filter(Boolean);
  same(found.join(''));
  assert.ok(found.length > 1, 'one piece');
}

export function oneCall(calls) {
  assert.deepEqual(calls.map((call) => call.name), ['save_city']);
  const input = calls[0].input;
  City.strict().parse(typeof input === 'string' ? JSON.parse(input) : input);
}

export async function collect(stream) {
  const found = [];
  for await (const part of stream) found.push(part);
  return found;
}

export async function report(name, checks) {
  const file = new globalThis.URL(`../node_modules/${name}/package.json`, import.meta.url);
  write({ version: JSON.parse(readFileSync(file)).version });
  for (const [check, run] of Object.entries(checks)) {
    try {
      write({ check, note: (await run()) ?? '' });
    } catch (error) {
      console.error(error);
      write({ check, error: `${error.name}: ${String(error.message).split('\n')[0]}` });
    }
  }
}

function write(fields) {
  console.log(`\n${JSON.stringify(fields)}`);
}
