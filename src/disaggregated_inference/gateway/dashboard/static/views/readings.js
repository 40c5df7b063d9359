// Everything that the machines measure of themselves, in words. What is missing says why.
import { html } from "../html.js";
import * as format from "../format.js";

const WORDS = { gpus: "GPU", power_w: "power", temperature_c: "temperature", clock_mhz: "clock" };
const share = (value) => `${Math.round(100 * value)} %`;
const part = (value, text) => value != null && text(value);
const used = (reading) => part(reading.memory_used_bytes, (value) => `memory ${format.bytes(value)} of ${format.bytes(reading.memory_total_bytes)}${reading.memory_shared ? ", shared by processor and GPU" : ""}`);

const gpuLine = (gpu) => [
  gpu.name || "GPU",
  part(gpu.utilisation, (value) => `${share(value)} in use`),
  !gpu.memory_shared && used(gpu),
  part(gpu.power_w, (value) => `${Math.round(value)} W${gpu.power_limit_w ? ` of ${Math.round(gpu.power_limit_w)} W` : ""}`),
  part(gpu.temperature_c, (value) => `${Math.round(value)} °C`),
  part(gpu.clock_mhz, (value) => `${format.count(value)} MHz`),
  gpu.throttled.length > 0 && `throttled: ${gpu.throttled.join(", ")}`,
];

const networkLine = (network) => [
  `network ${network.name}`,
  part(network.received_bytes_s, (value) => `in ${format.bytesPerSecond(value)}`),
  part(network.sent_bytes_s, (value) => `out ${format.bytesPerSecond(value)}`),
  part(network.line_rate_bits_s, (value) => `line rate ${format.bytesPerSecond(value / 8)}`),
];

function linesOf(readings) {
  const missing = [readings, ...readings.gpus].flatMap((each) => Object.entries(each.missing));
  return [
    [readings.machine, part(readings.cpu_share, (value) => `CPU ${share(value)}`), used(readings), part(readings.power_w, (value) => `power ${Math.round(value)} W (${readings.power_covers})`)],
    ...readings.gpus.map(gpuLine),
    ...readings.networks.map(networkLine),
    ...missing.map(([name, why]) => [`${WORDS[name] || name.replaceAll("_", " ")} not available: ${why}`]),
  ].map((line) => line.filter(Boolean).join(" · "));
}

export const AllReadings = ({ nodes }) => html`
  <details class="all-readings"><summary>All readings of these machines</summary>
    ${nodes.map((node) => html`
      <h3>${node.name}</h3>
      ${node.readings ? linesOf(node.readings).map((line) => html`<p class="muted">${line}</p>`) : html`<p class="muted">not available</p>`}`)}
  </details>`;
