// Energy and cost: per model, key and day, and beside running each machine alone.
import { Component, html } from "../html.js";
import * as format from "../format.js";
import { Choice, RANGES } from "./choices.js";
import { Loaded } from "./loading.js";

export class Energy extends Component {
  state = { range: "24h" };

  render({ store }, { range }) {
    const show = (found) => html`
      <section class="panel"><div class="fields"><${Choice} id="energy-range" label="Time" value=${range} options=${RANGES} choose=${(value) => this.setState({ range: value })} /></div>
        <${Lacking} total=${found.total} />
      </section>
      <${EnergyTable} title="In all" name="Sum" rows=${found.total.requests ? { "all requests": found.total } : {}} />
      <${EnergyTable} title="By model" name="Model" rows=${found.models} />
      <${EnergyTable} title="By API key" name="Key" rows=${found.callers} />
      <${EnergyTable} title="By day" name="Day" rows=${found.days} />
      <${Alone} rows=${found.alone} />`;
    return html`<${Loaded} store=${store} path="cluster/energy?range=${range}" what="Energy and cost" show=${show} />`;
  }
}

function Lacking({ total: { requests, with_energy: known, cost } }) {
  if (!requests) return html`<p class="empty">No request in this time.</p>`;
  if (known && cost == null) return html`<p class="empty">No cost is known: set <code>electricity_price_per_kwh</code> of the policies and <code>price</code> of the servers in the cluster file.</p>`;
  if (known) return null;
  return html`<p class="empty">No request has a known energy. Nodes with a power meter report it; for others set <code>power_w</code> of the server in the cluster file.</p>`;
}

function source(each) {
  if (!each.with_energy) return "–";
  if (!each.configured_j) return "measured";
  return each.measured_j ? `${Math.round((100 * each.measured_j) / each.energy_j)} % measured, else configured watts` : "configured watts";
}

function EnergyTable({ title, name, rows }) {
  const entries = Object.entries(rows || {});
  if (!entries.length) return null;
  const id = `energy-${title.replaceAll(" ", "-")}`;
  return html`
    <section class="panel" aria-labelledby=${id}>
      <h2 id=${id}>${title}</h2>
      <div class="scroll" tabindex="0" role="region" aria-labelledby=${id}><table class="wide even">
        <thead><tr><th scope="col">${name}</th><th scope="col" class="num">Requests</th><th scope="col" class="num">Energy</th><th scope="col">Source</th><th scope="col" class="num">Per token</th><th scope="col" class="num">Requests per kWh</th><th scope="col" class="num">Cost</th></tr></thead>
        <tbody>${entries.map(([key, each]) => html`
          <tr>
            <th scope="row"><span class="name" title=${key}>${key || "no key"}</span></th>
            <td data-word="requests" class="num">${format.count(each.requests)}</td>
            <td data-word="energy" class="num">${each.with_energy ? format.joules(each.energy_j) : "not available"}${each.with_energy > 0 && each.with_energy < each.requests && html`<span class="sub">of ${format.count(each.with_energy)} requests</span>`}</td>
            <td data-word="source">${source(each)}</td>
            <td data-word="per token" class="num">${each.joules_per_token == null ? "–" : format.joules(each.joules_per_token)}</td>
            <td data-word="requests per kWh" class="num">${format.count(each.requests_per_kwh)}</td>
            <td data-word="cost" class="num">${format.dollars(each.cost)}${each.cost != null && each.cost_partial > 0 && html`<span class="sub">at least: a price is missing</span>`}</td>
          </tr>`)}</tbody>
      </table></div>
    </section>`;
}

const price = (value) => (value == null ? "–" : format.dollars(value));

// Without it, machines that wait for each other seem to cost nothing.
function Idle({ rows }) {
  const models = [...new Set(rows.filter((row) => row.together_j != null && !row.idle_included).map((row) => row.model))];
  if (!models.length) return null;
  return html`<p class="under warn" id="no-idle"><span aria-hidden="true">!</span> Energy together is without what a machine draws while it waits for the other one: set <code>idle_power_w</code> of both machines of ${models.join(", ")}.</p>`;
}

function Alone({ rows }) {
  if (!rows?.length) return null;
  const priced = rows.some((row) => row.together_cost != null || row.alone_cost != null);
  return html`
    <section class="panel" aria-labelledby="alone">
      <h2 id="alone">Beside one machine alone</h2>
      <p class="under">An estimate. Together: what was measured while at least one of the requests ran; its cost is that of both machines for all of this time. Alone: the least that one machine would take, by its measured rates and its watts, in batches as large as they were.</p>
      <${Idle} rows=${rows} />
      <div class="scroll" tabindex="0" role="region" aria-labelledby="alone"><table class="wide">
        <thead><tr><th scope="col">Machine</th><th scope="col" class="num">Requests</th><th scope="col" class="num">At once</th><th scope="col" class="num">Energy together</th><th scope="col" class="num">alone</th><th scope="col" class="num">Time together</th><th scope="col" class="num">alone</th>${priced && html`<th scope="col" class="num">Cost together</th><th scope="col" class="num">alone</th>`}</tr></thead>
        <tbody>${rows.map((row) => html`
          <tr data-machine=${row.node}>
            <th scope="row">${row.node}<span class="sub">${row.machine} machine of ${row.model}</span>${row.why && html`<span class="sub">${row.why}</span>`}</th>
            <td class="num" data-word="requests">${format.count(row.requests)}</td>
            <td class="num" data-word="at once">${format.significant(row.batch_size)}</td>
            <td class="num" data-word="energy together">${row.together_j == null ? "–" : format.joules(row.together_j)}</td>
            <td class="num" data-word="energy alone">${row.alone_j == null ? "–" : format.joules(row.alone_j)}</td>
            <td class="num" data-word="time together">${format.seconds(row.together_s)}</td>
            <td class="num" data-word="time alone">${format.seconds(row.alone_s)}</td>
            ${priced && html`<td class="num" data-word="cost together">${price(row.together_cost)}</td><td class="num" data-word="cost alone">${price(row.alone_cost)}</td>`}
          </tr>`)}</tbody>
      </table></div>
    </section>`;
}
