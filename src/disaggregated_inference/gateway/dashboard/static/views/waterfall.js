// Where the time of one request went.
import { Component, html } from "../html.js";
import { getJson } from "../api.js";
import * as format from "../format.js";
import { Outcome, way } from "./marks.js";

// Which half of the machine pair a phase belongs to, for its colour.
const ROLES = { prefill: "prefill", "prefill queue": "prefill", load: "prefill", decode: "decode", "exposed transfer": "transfer", "transfer, hidden": "transfer", inject: "transfer", failed: "bad" };
const ABOUT = {
  queue: "waited in the orchestrator's queue",
  tokenize: "chat template and tokens",
  admission: "the decode node waited for KV memory",
  canary: "the decode node checked the prefill node",
  "prefill queue": "waited for the engine of the prefill node",
  load: "loaded the model",
  prefill: "read the prompt",
  "transfer, hidden": "KV moved while the prompt was read: the seconds on the wire, somewhere in the pale span",
  "exposed transfer": "from the end of reading until the whole KV was there. The first token comes first: this delays the second",
  inject: "KV placed into the engine: the engine's seconds, somewhere in the pale span",
  decode: "wrote the answer",
  failed: "lost to a failed attempt",
  overhead: "HTTP and planning",
};

// Time that no phase explains, between two phases that do: one line for all of it is enough.
const TINY_S = 0.002;
const isTiny = (phase) => phase.name === "overhead" && phase.seconds < TINY_S;

// The phases of the record, and the parts of the transfer that run beside them.
export function bars(record) {
  const phases = record.waterfall.filter((phase) => !isTiny(phase)).map((phase) => ({ ...phase, span_s: phase.seconds, beside: false }));
  const reading = phases.findLast((phase) => phase.name === "prefill");
  if (!record.kv_bytes || !reading || !record.transfer_time) return phases;
  const read = reading.start_s + reading.seconds;
  const ready = read + (record.exposed_transfer_time ?? 0);
  const first = Math.min(read, Math.max(0, ready - record.fetch_time + record.first_slice_time));
  const place = phases.indexOf(reading) + 1;
  const beside = (name, seconds, end) => ({ name, seconds, start_s: first, span_s: end - first, node: record.decode_node, beside: true });
  const parts = [beside("transfer, hidden", record.hidden_transfer_time, read), beside("inject", record.inject_time, ready)];
  return [...phases.slice(0, place), ...parts.filter((part) => part.seconds > 0 && part.span_s > 0), ...phases.slice(place)];
}

// `scale`: the seconds that the whole width stands for, so that two waterfalls can be compared.
export function Waterfall({ record, scale }) {
  const total = scale || record.total_time || 1;
  const x = (time) => (100 * time) / total;
  const predicted = record.predicted_first_token_time;
  return html`
    <table class="waterfall">
      <caption class="hidden">Phases of the request, in the order in which they began</caption>
      <thead><tr><th scope="col">Phase</th><th scope="col" class="node">Node</th><th scope="col" class="num start">Start</th><th scope="col" class="num">Time</th><th scope="col" class="lane"><span class="hidden">On the clock</span></th></tr></thead>
      <tbody>
        ${bars(record).map((bar) => html`
          <tr class=${bar.beside ? "beside" : ""} data-phase=${bar.name}>
            <th scope="row" title=${ABOUT[bar.name] || ""}>${bar.name}</th>
            <td class="node"><span class="name" title=${bar.node}>${bar.node || "gateway"}</span></td>
            <td class="num start">${format.seconds(bar.start_s)}</td>
            <td class="num">${format.seconds(bar.seconds)}</td>
            <td class="lane"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
              <rect class="bar ${ROLES[bar.name] || "other"}" x=${Math.min(x(bar.start_s), 99.7)} width=${Math.min(Math.max(x(bar.span_s), 0.3), 100)} y="1" height="8" />
              ${record.first_token_time > 0 && html`<line class="first" x1=${x(record.first_token_time)} x2=${x(record.first_token_time)} y1="0" y2="10" />`}
              ${predicted > 0 && predicted < total && html`<line class="predicted" x1=${x(predicted)} x2=${x(predicted)} y1="0" y2="10" />`}
            </svg></td>
          </tr>`)}
      </tbody>
    </table>
    <p class="legend">
      ${scale > 0 && html`<span class="num scale">0 to ${format.seconds(scale)}</span>`}
      <span><span class="key first" aria-hidden="true"></span> first token at ${format.seconds(record.first_token_time || null)}</span>
      ${predicted > 0 && html`<span><span class="key predicted" aria-hidden="true"></span> predicted ${format.seconds(predicted)}${difference(record)}</span>`}
      ${record.waterfall.some(isTiny) && html`<span>${format.seconds(format.sum(record.waterfall.filter(isTiny).map((phase) => phase.seconds)))} of overhead in pieces under 2 ms is not drawn</span>`}
    </p>`;
}

function difference({ first_token_time: real, predicted_first_token_time: predicted }) {
  if (!real || !predicted) return "";
  const share = Math.round((100 * (real - predicted)) / predicted);
  return share === 0 ? ", as it was" : `, real ${share > 0 ? "+" : "−"}${Math.abs(share)} %`;
}

const Fact = ({ name, children }) => html`<div><dt>${name}</dt><dd class="num">${children}</dd></div>`;

export function Facts({ record }) {
  return html`
    <dl class="facts">
      <${Fact} name="Prompt">${format.count(record.prompt_tokens)} tokens, ${format.count(record.cached_tokens)} cached<//>
      <${Fact} name="Completion">${format.count(record.completion_tokens)} tokens${record.finish_reason ? `, ${record.finish_reason}` : ""}<//>
      <${Fact} name="Prefill">${format.seconds(record.prefill_time)}, ${format.tokensPerSecond(record.prefill_speed)}<//>
      <${Fact} name="Decode">${format.seconds(record.decode_time)}, ${format.tokensPerSecond(record.decode_speed)}<//>
      <${Fact} name="KV moved">${moved(record)}<//>
      <${Fact} name="On the wire">${record.kv_bytes && record.transfer_time ? `${format.seconds(record.transfer_time)}, ${format.bytesPerSecond(record.kv_bytes / record.transfer_time)}` : "–"}<//>
      <${Fact} name="Transfer hidden / exposed">${record.kv_bytes || record.exposed_transfer_time ? `${format.seconds(record.hidden_transfer_time)} / ${format.seconds(record.exposed_transfer_time)}` : "–"}<//>
      <${Fact} name="Time per token after the first">${format.seconds(record.output_token_time)}<//>
      <${Fact} name="Answers in its batch">${record.batch_size ? format.significant(record.batch_size) : "–"}<//>
      <${Fact} name="Prompt tokens recomputed">${record.kv_bytes || record.method?.startsWith("disaggregated") ? format.count(record.prompt_tokens_recomputed) : "– (the decode node read the prompt)"}<//>
      <${Fact} name="Attempts">${format.count(record.attempts)}<//>
      <${Fact} name="Energy">${energy(record)}<//>
      <${Fact} name="Cost">${format.dollars(record.cost)}${record.cost_without?.length > 0 && html`<span class="sub">without ${record.cost_without.join(", ")}</span>`}<//>
    </dl>`;
}

// A decode node that still has the prompt of an earlier request needs the logits alone. "cached" is the prefill node's.
function moved({ kv_bytes: size, kv_codec: codec, method, decode_node: node, prompt_tokens_recomputed: recomputed }) {
  if (size) return `${format.bytes(size)}${codec ? `, ${codec}` : ""}`;
  return method?.startsWith("disaggregated") && !recomputed ? `none: ${node} had it` : "none";
}

function energy(record) {
  return `${format.joules(record.energy_j)}${record.energy_source ? `, ${record.energy_source}` : ""}`;
}

export function Reasons({ record }) {
  return html`
    ${record.plan && html`<p class="plan"><strong>Why this way, by the estimate:</strong> ${record.plan}</p>`}
    ${record.error && html`<p class="bad"><span aria-hidden="true">✕</span> ${record.error.code}: ${record.error.message}</p>`}
    ${record.warnings?.map((warning) => html`<p class="warn"><span aria-hidden="true">!</span> ${warning}${record.warning_reason ? `: ${record.warning_reason}` : ""}</p>`)}
    ${record.failovers?.map((each) => html`<p class="warn"><span aria-hidden="true">!</span> failover at ${format.seconds(each.at_s)}: ${each.node}, ${each.code}: ${each.message} (noticed after ${format.seconds(each.detected_s)}${each.stall_s != null ? `, the answer stood still for ${format.seconds(each.stall_s)}` : ""})</p>`)}`;
}

// A row of the history has no waterfall: it is asked for.
export class RequestDialog extends Component {
  state = { full: null, error: "" };

  componentDidMount() {
    this.dialog.showModal();
    if (!this.props.record.waterfall) this.load();
  }

  async load() {
    const { record, store } = this.props;
    try {
      const { request } = await getJson(`cluster/requests/${encodeURIComponent(record.request_id)}`, { key: store.key });
      this.setState({ full: request });
    } catch (error) {
      this.setState({ error: error.message });
    }
  }

  render({ record, close }, { full, error }) {
    const whole = record.waterfall ? record : full;
    return html`
      <dialog class="request" ref=${(element) => (this.dialog = element)} onClose=${close} onClick=${(event) => event.target === this.dialog && this.dialog.close()} aria-labelledby="dialog-title">
        <div class="sheet">
          <button type="button" class="quiet close" onClick=${() => this.dialog.close()} aria-label="Close">✕</button>
          <h2 id="dialog-title">${record.model}</h2>
          <p class="under"><${Outcome} record=${record} /> · ${format.seconds(record.total_time)} · ${way(record)} · ${format.clock(record.time)} · <code>${record.request_id}</code></p>
          <${Reasons} record=${record} />
          ${error && html`<p class="bad" role="alert"><span aria-hidden="true">✕</span> ${error}</p>`}
          ${whole ? html`<div class="scroll"><${Waterfall} record=${whole} /></div>` : html`<p class="muted">${error ? "" : "Reading the waterfall."}</p>`}
          <${Facts} record=${whole || record} />
        </div>
      </dialog>`;
  }
}
