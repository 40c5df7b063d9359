// The first screen: a card per model, the combined card, server health, the last ten requests.
import { html } from "../html.js";
import * as format from "../format.js";
import { Mark, Outcome, nodeKind, way } from "./marks.js";
import { Picture } from "./picture.js";

const LAST = 10;

export function Overview({ store, open }) {
  const { status, history } = store;
  const models = Object.keys(status.models);
  return html`
    <${Alarms} store=${store} />
    <section class="cards" aria-label="Performance">
      ${models.map((model) => html`<${ModelCard} key=${model} model=${model} verdict=${status.models[model]} figures=${store.summary.models[model] || {}} />`)}
      <${CombinedCard} store=${store} />
    </section>
    <div class="columns">
      <${Health} nodes=${status.nodes} />
      <${RequestTable} title="Last ten requests" records=${history.slice(0, LAST)} open=${open} empty=${status.nodes.some((node) => node.usable) ? undefined : noneUp()} />
    </div>
    <${Picture} store=${store} />`;
}

function Alarms({ store }) {
  const { status } = store;
  const lines = [...status.warnings, ...status.refusals.map((each) => `${each.decode} refuses KV of ${each.prefill}: ${each.why}`), ...silentLines(store.history)];
  if (!lines.length) return null;
  return html`<section class="banner warn" role="alert" aria-label="Warnings">${lines.map((line) => html`<p><span aria-hidden="true">!</span> ${line}</p>`)}</section>`;
}

// Disaggregation that silently does not happen.
export function silentLines(history) {
  const done = history.filter((each) => each.ok && each.decode_node);
  const lines = [];
  const fallbacks = done.filter((each) => each.method === "fallback").length;
  if (fallbacks) lines.push(`${fallbacks} of the last ${done.length} answers were fallbacks: the decode node read the prompt because no prefill node could`);
  const handed = done.filter((each) => each.method?.startsWith("disaggregated"));
  const recomputed = format.sum(handed.map((each) => each.prompt_tokens_recomputed));
  if (recomputed) lines.push(`decode nodes computed ${format.count(recomputed)} prompt tokens again, of prompts that were handed over`);
  return lines;
}

const Figure = ({ role, name, time, speed }) => html`
  <div class="figure ${role}">
    <dt>${name}</dt>
    <dd><strong class="num">${format.seconds(time)}</strong><span class="num">${speed}</span></dd>
  </div>`;

const CANNOT_SERVE = new Set(["decode down: cannot serve", "nothing is up"]); // see ModelVerdict

function ModelCard({ model, verdict, figures }) {
  const kind = verdict === "all up" ? "ok" : CANNOT_SERVE.has(verdict) ? "bad" : "warn";
  return html`
    <article class="card" data-model=${model}>
      <h2 title=${model}>${model}</h2>
      <p class="under"><${Mark} kind=${kind} /> ${verdict}</p>
      <dl>
        <${Figure} role="prefill" name="Prefill" time=${figures.prefill_time} speed=${figures.all_cached ? "cached" : format.tokensPerSecond(figures.prefill_speed)} />
        <${Figure} role="decode" name="Decode" time=${figures.decode_time} speed=${format.tokensPerSecond(figures.decode_speed)} />
        <${Figure} role="total" name="Total" time=${figures.total_time} speed=${`first token ${format.seconds(figures.first_token_time).replace(" ", "\u00a0")}`} />
      </dl>
      <p class="foot">${figures.answered ? `medians of ${format.count(figures.answered)} answered request${figures.answered === 1 ? "" : "s"}` : "no answered request yet"}${figures.exposed_transfer_time > 0 && html` · <span class="num whole" title="KV that arrived after the prompt was read: between the first token and the second. Median of the requests whose KV moved">exposed transfer ${format.seconds(figures.exposed_transfer_time)}</span>`}</p>
    </article>`;
}

function CombinedCard({ store }) {
  const { answered, busy_time: busy, speedup, tokens_per_s: throughput } = store.summary.combined;
  return html`
    <article class="card combined">
      <h2>Combined</h2>
      <p class="under">all models, ${answered ? `${store.seesAll ? "last" : "your last"} ${format.count(answered)} answered` : "no answered request yet"}</p>
      <dl>
        <div class="figure total"><dt>Total</dt><dd><strong class="num" id="combined-total">${format.seconds(busy)}</strong><span>while requests ran</span></dd></div>
        <div class="figure total"><dt>Speedup</dt><dd><strong class="num" id="combined-speedup">${format.times(speedup)}</strong><span title="What the requests would have taken one after the other, each with the cluster to itself, over the time in which at least one ran">against one by one</span></dd></div>
        <div class="figure total"><dt>Throughput</dt><dd><strong class="num" id="combined-throughput">${format.rate(throughput)}</strong><span>tok/s average</span></dd></div>
      </dl>
      <${Served} status=${store.status} />
    </article>`;
}

// Counts of all requests are for those who see all requests.
function Served({ status: { served, latency, queue } }) {
  const waiting = `waiting ${format.count(format.sum(Object.values(queue).map((each) => each.waiting)))}`;
  if (!served) return html`<p class="foot num">requests of this key · ${waiting}</p>`;
  return html`<p class="foot num">since its start: served ${format.count(served.ok)} · failed ${format.count(served.failed)} · refused ${format.count(served.refused)} · <span class="whole">cancelled ${format.count(served.cancelled)}</span><br />
      p50 ${format.seconds(latency.total_time.p50)} · p95 ${format.seconds(latency.total_time.p95)} · p99 ${format.seconds(latency.total_time.p99)} · ${waiting}</p>`;
}

function Health({ nodes }) {
  return html`
    <section class="panel" aria-labelledby="health">
      <h2 id="health">Server health</h2>
      ${nodes.length ? html`<div class="scroll" tabindex="0" role="region" aria-labelledby="health"><table class="nodes ${nodes.length > 8 ? "many" : ""}">
        <thead><tr><th scope="col">Name</th><th scope="col">Role</th><th scope="col">State</th><th scope="col">Address</th></tr></thead>
        <tbody>${nodes.map((node) => html`<${NodeRow} key=${node.name} node=${node} />`)}</tbody>
      </table></div>` : html`<p class="empty">The cluster file names no nodes.</p>`}
    </section>`;
}

function NodeRow({ node }) {
  const kind = nodeKind(node);
  return html`
    <tr data-node=${node.name} data-kind=${kind}>
      <th scope="row"><span class="name" title=${node.name}>${node.name}</span><span class="sub" title=${node.model}>${node.model}</span></th>
      <td><span class="role ${node.role}">${node.role}</span>${node.engine && html`<span class="sub">${node.engine}</span>`}</td>
      <td><span class="state ${kind}"><${Mark} kind=${kind} /> ${node.state}</span>${node.why && html`<span class="sub why" title=${node.why}>${node.why}</span>`}</td>
      <td class="num address">${node.url.replace(/^https?:\/\//, "")}</td>
    </tr>`;
}

const noneYet = () => html`No request yet. The <a href="#playground">playground</a> sends a prompt; <code>curl ${location.origin}/v1/models</code> names the models.`;
const noneUp = () => html`No request, and no machine is up. Start the nodes; <code>disagg doctor --cluster</code> says what is wrong.`;

export function RequestTable({ title, records, open, dated = false, empty = noneYet() }) {
  return html`
    <section class="panel" aria-labelledby="requests">
      <h2 id="requests">${title}</h2>
      ${records.length ? html`<div class="scroll" tabindex="0" role="region" aria-labelledby="requests"><table class="requests">
        <thead><tr><th scope="col">#</th><th scope="col">Model</th><th scope="col" class="num">Total</th><th scope="col">Outcome</th><th scope="col" class="num">Prefill → decode</th><th scope="col">Way</th><th scope="col" class="num">At</th></tr></thead>
        <tbody>${records.map((record) => html`<${RequestRow} key=${record.request_id} record=${record} open=${open} dated=${dated} />`)}</tbody>
      </table></div>` : html`<p class="empty">${empty}</p>`}
    </section>`;
}

// So little of the prompt was read that a speed says nothing.
const isCached = (record) => record.cached_tokens >= 0.9 * Math.max(1, record.prompt_tokens);

// Numbers are those of all requests: a key that sees only its own has none.
const nameOf = (record) => (record.number ? `#${record.number}` : record.request_id.slice(0, 8));

function RequestRow({ record, open, dated }) {
  const name = nameOf(record);
  const read = isCached(record) ? "cached" : format.rate(record.prefill_speed);
  const speeds = record.prefill_speed > 0 || record.decode_speed > 0 ? `${read} → ${format.rate(record.decode_speed)} tok/s` : "–";
  return html`
    <tr data-request=${record.request_id} onClick=${() => open(record)}>
      <th scope="row"><button type="button" class="link num" onClick=${(event) => (event.stopPropagation(), open(record))} aria-label="Waterfall of request ${name}">${name}</button></th>
      <td><span class="name" title=${record.model}>${record.model}</span></td>
      <td class="num">${format.seconds(record.total_time)}</td>
      <td><${Outcome} record=${record} /></td>
      <td class="num">${speeds}</td>
      <td><span class="name way" title=${way(record)}>${way(record)}</span></td>
      <td class="num muted">${dated ? format.date(record.time) : format.clock(record.time)}</td>
    </tr>`;
}
