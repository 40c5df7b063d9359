// The cluster as a picture: per model the prefill nodes on the left, the decode nodes on the right, links between them.
import { html } from "../html.js";
import * as format from "../format.js";
import { Mark, Meter, nodeKind } from "./marks.js";
import { AllReadings } from "./readings.js";

const BOX = 164; // heights of a node's box, and the gap below it: style.css has the same
const SMALL_BOX = 84;
const GAP = 14;
const MANY = 4; // nodes in a column; more get small boxes on the overview
const LABELLED = 6; // links of a model; more would cover each other, and the list below has all of them

export const ClusterView = ({ store }) => html`<${Picture} store=${store} full=${true} />`;

// `full`: with a list of the links.
export function Picture({ store, full = false }) {
  return Object.keys(store.status.models).map((model) => html`<${ModelPicture} key=${model} model=${model} store=${store} full=${full} />`);
}

function ModelPicture({ model, store, full }) {
  const { status } = store;
  const nodes = status.nodes.filter((node) => node.model === model);
  const left = nodes.filter((node) => node.role === "prefill");
  const right = nodes.filter((node) => node.role !== "prefill");
  const links = linksOf(store, left, right);
  const rows = Math.max(left.length, right.length);
  const small = !full && rows > MANY;
  return html`
    <section class="panel picture" data-model=${model}>
      <div class="title"><h2 title=${model}>${model}</h2><p class="under">${status.models[model]}</p></div>
      <div class="machines ${small ? "small" : ""}">
        <div class="column">${left.length ? left.map((node) => html`<${NodeBox} key=${node.name} node=${node} />`) : html`<p class="empty">No prefill node: decode nodes read prompts themselves.</p>`}</div>
        <${Wires} links=${links} rows=${rows} box=${small ? SMALL_BOX : BOX} />
        <div class="column">${right.map((node) => html`<${NodeBox} key=${node.name} node=${node} />`)}</div>
      </div>
      ${full ? links.length > 0 && html`<${LinkTable} links=${links} />` : html`<${LinkList} links=${links} />`}
      ${full && html`<${AllReadings} nodes=${nodes} />`}
    </section>`;
}

function linksOf(store, left, right) {
  const known = new Map(store.status.links.map((link) => [`${link.prefill} ${link.decode}`, link]));
  return left.flatMap((prefill, row) => right.map((decode, other) => {
    const name = `${prefill.name} ${decode.name}`;
    const refusal = store.status.refusals.find((each) => each.prefill === prefill.name && each.decode === decode.name);
    const down = !prefill.usable || !decode.usable;
    const simulated = prefill.engine === "simulated" && decode.engine === "simulated";
    return { prefill: prefill.name, decode: decode.name, simulated, row, other, refusal, down, flow: store.flow.get(name) || 0, ...known.get(name) };
  }));
}

const measuredRate = (link) => (link.measured ? format.bytesPerSecond(link.bytes_per_s) : "not measured yet");

// Of a quiet link: a rate alone would look like traffic.
const tagRate = (link) => (link.line_rate_bytes_s && !link.simulated ? `${format.bytesPerSecond(link.bytes_per_s)} of ${format.bytesPerSecond(link.line_rate_bytes_s)}` : `measured ${format.bytesPerSecond(link.bytes_per_s)}`);

const tagText = (link) => (link.flow > 0 ? `KV ${format.bytesPerSecond(link.flow)}` : link.measured ? tagRate(link) : stateOf(link) === "quiet" ? "not measured" : stateOf(link));

// For readers of the screen, and where it is too narrow for lines between the machines.
function LinkList({ links: all }) {
  const links = all.filter((link) => link.measured || link.refusal || link.flow > 0 || all.length <= LABELLED);
  if (!links.length) return null;
  return html`
    <ul class="link-list" aria-label="Links">
      ${links.map((link) => html`<li><span class="name">${link.prefill} → ${link.decode}</span> <span class="num ${stateOf(link)}">${tagText(link)}</span></li>`)}
    </ul>`;
}

function lineRate(link) {
  if (!link.line_rate_bytes_s) return "not in the cluster file";
  const line = format.bytesPerSecond(link.line_rate_bytes_s);
  if (link.simulated) return `${line}, of the simulated machines`;
  return link.measured ? `${line} (${Math.round((100 * link.bytes_per_s) / link.line_rate_bytes_s)} % reached)` : line;
}

function stateOf(link) {
  if (link.refusal) return "refused";
  if (link.flow > 0) return "flowing";
  return link.down ? "down" : "quiet";
}

function Wires({ links, rows, box }) {
  const height = rows * (box + GAP) - GAP;
  const y = (row) => row * (box + GAP) + box / 2;
  const right = Math.max(...links.map((link) => link.other), 0) + 1;
  return html`
    <svg class="wires" viewBox="0 0 300 ${height}" height=${height} preserveAspectRatio="none" aria-hidden="true">
      ${links.map((link) => html`<line class="wire ${stateOf(link)} ${links.length > LABELLED && !link.measured && stateOf(link) === "quiet" ? "unused" : ""}" x1="0" x2="300" y1=${y(link.row)} y2=${y(link.other)} vector-effect="non-scaling-stroke" />`)}
    </svg>
    <div class="tags" aria-hidden="true">
      ${links.length <= LABELLED && links.map((link) => {
        const at = right > 1 ? 0.22 + (0.56 * (link.other + 0.5)) / right : 0.5;
        const style = { left: `${100 * at}%`, top: `${y(link.row) + (y(link.other) - y(link.row)) * at}px` };
        return html`<span class="tag ${stateOf(link)}" style=${style}>${tagText(link)}</span>`;
      })}
    </div>`;
}

function NodeBox({ node }) {
  const kind = nodeKind(node);
  const { kv, slots } = node;
  const known = node.epoch && node.state !== "unreachable"; // what it told before is over
  return html`
    <article class="box ${node.role}" data-node=${node.name} data-kind=${kind} title=${node.why || node.warning || node.state}>
      <h3><span class="name">${node.name}</span> <span class="state ${kind}"><${Mark} kind=${kind} /> ${node.state}</span></h3>
      <p class="sub"><span class="role ${node.role}">${node.role}</span> ${node.engine || "engine not known"} · ${node.url.replace(/^https?:\/\//, "")}</p>
      <${Meter} label="KV memory" value=${kv.total_reserved_bytes || kv.reserved_bytes} most=${known ? kv.total_limit_bytes || kv.limit_bytes : 0} text=${known && kv.limit_bytes ? `${format.bytes(kv.total_reserved_bytes || kv.reserved_bytes)} of ${format.bytes(kv.total_limit_bytes || kv.limit_bytes)}` : "not available"} />
      <${Meter} label="Slots" value=${slots.used} most=${known ? slots.most : 0} text=${known ? `${slots.used} of ${slots.most}, ${Math.max(0, node.waiting - slots.used)} waiting` : "not available"} />
      <${Readings} node=${node} />
    </article>`;
}

// What the machine measures of itself. Nothing is guessed: without a meter it says so, and the tooltip says why.
function Readings({ node }) {
  const { readings } = node;
  if (!readings) return html`<p class="readings">Readings not available</p>`;
  const gpu = readings.gpus[0] || {};
  const missing = { ...readings.missing, ...gpu.missing };
  const shown = (value, text) => (value == null ? "not available" : text(value));
  const heat = Math.max(...readings.gpus.map((each) => each.temperature_c ?? -Infinity));
  const share = (value) => `${Math.round(100 * value)} %`;
  const memory = (used) => `${format.bytes(used)} of ${format.bytes(readings.memory_total_bytes)}${readings.memory_shared ? ", shared with the GPU" : ""}`;
  const parts = [
    `CPU ${shown(readings.cpu_share, share)}`,
    readings.gpus.length > 0 && `GPU ${shown(gpu.utilisation, share)}`,
    `memory ${shown(readings.memory_used_bytes, memory)}`,
    `power ${readings.power_w == null && node.configured_power_w != null ? `${Math.round(node.configured_power_w)} W configured, no meter` : shown(readings.power_w, (watts) => `${Math.round(watts)} W`)}`,
    `temperature ${shown(Number.isFinite(heat) ? heat : null, (value) => `${Math.round(value)} °C`)}`,
  ];
  return html`
    <p class="readings" title=${Object.entries(missing).map(([name, why]) => `${name}: ${why}`).join("\n")}>${parts.filter(Boolean).join(" · ").replace(/(\d) (?=\D)/g, "$1\u00a0")}${gpu.throttled?.length > 0 && html` <span class="warn">! throttled: ${gpu.throttled.join(", ")}</span>`}</p>`;
}

function LinkTable({ links: all }) {
  const links = all.filter((link) => link.measured || link.line_rate_bytes_s || link.refusal || all.length <= LABELLED);
  const unused = all.length - links.length;
  if (!links.length) return html`<p class="muted">No link was used yet.</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Links"><table class="links wide">
      <thead><tr><th scope="col">Link</th><th scope="col">State</th><th scope="col" class="num">Now</th><th scope="col" class="num">Measured</th><th scope="col" class="num">Line rate</th><th scope="col" class="num">Moved</th></tr></thead>
      <tbody>${links.map((link) => html`
        <tr>
          <th scope="row"><span class="name" title="${link.prefill} → ${link.decode}">${link.prefill} → ${link.decode}</span></th>
          <td data-word="state">${link.refusal ? html`<span class="state bad" title=${link.refusal.why}><${Mark} kind="bad" /> refused: ${link.refusal.why}</span>` : stateOf(link)}</td>
          <td class="num" data-word="now">${link.flow > 0 ? format.bytesPerSecond(link.flow) : "–"}</td>
          <td class="num" data-word="measured">${measuredRate(link)}</td>
          <td class="num" data-word="line rate">${lineRate(link)}</td>
          <td class="num" data-word="moved">${format.bytes(link.payload_bytes)}</td>
        </tr>`)}</tbody>
    </table></div>
    ${unused > 0 && html`<p class="muted">${unused} other links were not used yet.</p>`}`;
}
