// States as a mark and a word: never by colour alone.
import { html } from "../html.js";

const WAITING = new Set(["loading", "draining"]);

export function nodeKind(node) {
  if (node.usable && node.state === "healthy") return node.warning ? "warn" : "ok";
  return WAITING.has(node.state) || node.state.startsWith("circuit half") ? "warn" : "bad";
}

export function verdictKind(status) {
  const verdicts = Object.values(status.models);
  if (verdicts.every((verdict) => verdict === "all up")) return status.warnings.length ? "warn" : "ok";
  return verdicts.some((verdict) => /cannot serve|nothing/.test(verdict)) ? "bad" : "warn";
}

const MARKS = { ok: "✓", warn: "!", bad: "✕", idle: "…" };
export const Mark = ({ kind }) => html`<span class="sign ${kind}" aria-hidden="true">${MARKS[kind]}</span>`;

const OUTCOMES = { ok: ["ok", "ok"], failed: ["bad", "failed"], refused: ["warn", "refused"], cancelled: ["idle", "cancelled"] };
export function Outcome({ record }) {
  const [kind, word] = OUTCOMES[record.outcome] || [record.ok ? "ok" : "bad", record.ok ? "ok" : "failed"];
  return html`<span class="outcome"><${Mark} kind=${kind} /> ${word}</span>`;
}

// How the prompt was read.
export function way(record) {
  if (!record.decode_node) return "–";
  if (record.method === "fallback") return `fallback on ${record.decode_node}`;
  if (record.method === "local") return `local on ${record.decode_node}`;
  return `${record.prefill_node} → ${record.decode_node}`;
}

// A share of something, as a bar with a text that says the same.
export function Meter({ label, value, most, text, kind = "" }) {
  const share = most > 0 ? Math.min(100, (100 * value) / most) : 0;
  return html`
    <div class="meter ${kind}" role="img" aria-label="${label}: ${text}">
      <span class="label">${label}</span>
      <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect class="track" width="100" height="6" /><rect class="fill" width=${share} height="6" /></svg>
      <span class="num">${text}</span>
    </div>`;
}
