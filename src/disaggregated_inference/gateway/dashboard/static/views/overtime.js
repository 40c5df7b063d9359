// Over time: what the history says of latency, throughput, caches, ways and errors.
import { Component, html } from "../html.js";
import * as format from "../format.js";
import { Chart } from "./chart.js";
import { Choice, RANGES } from "./choices.js";
import { Loaded } from "./loading.js";

const share = (value) => (value == null ? "–" : `${Math.round(value * 1000) / 10} %`);
const number = (value) => (value == null ? "–" : value === 0 ? "0" : format.significant(value));
const spread = (name, colour) => [50, 95, 99].map((part) => ({ name: `p${part}`, key: `${name}_p${part}`, colour }));

const CHARTS = [
  { title: "Time to first token", about: "queue and prefill: the first token overtakes the transfer", show: format.seconds, lines: spread("ttft", "prefill") },
  { title: "Time per output token", about: "after the first; the exposed transfer is part of it", show: format.seconds, lines: spread("tpot", "decode") },
  { title: "End to end", about: "from the request to its last token", show: format.seconds, lines: spread("e2e", "ink") },
  { title: "Throughput", about: "tokens per second", show: number, lines: [{ name: "prompt", key: "prompt_tokens_per_s", colour: "prefill", dash: 0 }, { name: "completion", key: "completion_tokens_per_s", colour: "decode", dash: 0 }] },
  { title: "Requests", about: "per second", show: number, lines: [{ name: "requests/s", key: "requests_per_s", colour: "ink" }] },
  { title: "Queue", about: "waited before the first node", show: format.seconds, lines: spread("queue", "warn") },
  { title: "Prefix cache", about: "share of prompt tokens that were cached", show: share, lines: [{ name: "hit rate", key: "prefix_hit_rate", colour: "ok" }] },
  { title: "Ways", about: "share of answers", show: share, lines: [{ name: "handed over", key: "disaggregated", colour: "prefill", dash: 0 }, { name: "local", key: "local", colour: "decode", dash: 1 }, { name: "fallback", key: "fallback", colour: "bad", dash: 2 }] },
  { title: "Errors", about: "share of requests, without refused and cancelled ones", show: share, lines: [{ name: "errors", key: "errors", colour: "bad" }] },
  { title: "Exposed transfer", about: "p95 of what the prefill did not hide", show: format.seconds, lines: [{ name: "p95", key: "exposed_p95", colour: "transfer", dash: 0 }] },
  { title: "Recomputed prompt tokens", about: "of prompts that were handed over; zero is right", show: number, lines: [{ name: "tokens", key: "recomputed_tokens", colour: "bad", dash: 0 }] },
  { title: "Energy per request", about: "where it is known", show: format.joules, lines: [{ name: "energy", key: "energy_j_per_request", colour: "transfer", dash: 0 }] },
];

export class OverTime extends Component {
  constructor({ store }) {
    super();
    store.chosen ||= { range: "1h", model: "", node: "" };
    this.chosen = store.chosen;
  }

  choose = (changes) => {
    Object.assign(this.chosen, changes);
    this.setState({});
  };

  render({ store, theme }) {
    const show = (found) => html`<${Charts} found=${found} chosen=${this.chosen} choose=${this.choose} theme=${theme} />`;
    return html`<${Loaded} store=${store} path="cluster/series?${new URLSearchParams(given(this.chosen))}" what="The history" theme=${theme} show=${show} />`;
  }
}

function Charts({ found, chosen, choose, theme }) {
  const among = (all, names) => [["", all], ...names.map((each) => [each, each])];
  return html`
    <section class="panel"><div class="fields">
      <${Choice} id="time-range" label="Time" value=${chosen.range} options=${RANGES} choose=${(range) => choose({ range })} />
      <${Choice} id="time-model" label="Model" value=${chosen.model} options=${among("all models", found.models)} choose=${(model) => choose({ model })} />
      <${Choice} id="time-node" label="Node" value=${chosen.node} options=${among("all nodes", found.nodes)} choose=${(node) => choose({ node })} />
      <p class="muted fine">one point for ${duration(found.step_s)}</p>
    </div></section>
    <div class="charts">${CHARTS.map((chart) => html`
      <${Chart} key=${chart.title} ...${chart} theme=${theme} times=${found.times} step=${found.step_s} lines=${chart.lines.map((line) => ({ ...line, values: found.series[line.key] || found.times.map(() => null) }))} />`)}</div>`;
}

export const given = (wishes) => Object.entries(wishes).filter(([, value]) => value !== "" && value != null);
const duration = (step) => (step >= 3600 ? `${step / 3600} h` : step >= 60 ? `${step / 60} min` : `${step} s`);
