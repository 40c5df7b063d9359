// Targets beside measured values, and alarms for what fails silently.
import { Component, html } from "../html.js";
import * as format from "../format.js";
import { Choice, RANGES } from "./choices.js";
import { Loaded } from "./loading.js";
import { Mark } from "./marks.js";

const NAMES = {
  end_to_end: "End to end",
  requests_per_second: "Requests per second",
  parallel_efficiency: "Parallel efficiency",
  uptime: "Uptime",
  errors: "Errors",
  failover: "Failover",
  cost_per_request: "Cost per request",
  requests_per_kwh: "Requests per kWh",
  utilisation: "Utilisation",
};
const words = (name) => NAMES[name] || name.replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase());

export class Targets extends Component {
  state = { range: "1h" };

  render({ store }, { range }) {
    const show = (found) => html`
      <section class="panel"><div class="fields"><${Choice} id="target-range" label="Time" value=${range} options=${RANGES} choose=${(value) => this.setState({ range: value })} /></div></section>
      <${Alarms} alarms=${found.alarms} />
      <${TargetTable} targets=${found.targets} />`;
    return html`<${Loaded} store=${store} path="cluster/targets?range=${range}" what="The targets" show=${show} />`;
  }
}

const KINDS = { ok: ["ok", "ok"], alarm: ["bad", "alarm"], unknown: ["idle", "not known"] };

function Alarms({ alarms }) {
  return html`
    <section class="panel" aria-labelledby="alarms">
      <h2 id="alarms">Does disaggregation happen?</h2>
      <div class="scroll" tabindex="0" role="region" aria-labelledby="alarms"><table class="targets">
        <thead><tr><th scope="col">Alarm</th><th scope="col" class="num">Limit</th><th scope="col" class="num">Measured</th><th scope="col">State</th><th scope="col">What is measured</th></tr></thead>
        <tbody>${alarms.map((alarm) => html`
          <tr data-alarm=${alarm.name} data-state=${alarm.state}>
            <th scope="row">${words(alarm.name)}</th>
            <td class="num" data-word="limit">${format.withUnit(alarm.limit, alarm.unit)}</td>
            <td class="num" data-word="measured">${alarm.measured == null ? "not available" : format.withUnit(alarm.measured, alarm.unit, alarm.limit)}</td>
            <td><span class="state ${KINDS[alarm.state][0]}"><${Mark} kind=${KINDS[alarm.state][0]} /> ${KINDS[alarm.state][1]}</span></td>
            <td class="muted">${alarm.what}${alarm.why && html`<span class="bad">: ${alarm.why}</span>`}</td>
          </tr>`)}</tbody>
      </table></div>
    </section>`;
}

function TargetTable({ targets }) {
  return html`
    <section class="panel" aria-labelledby="targets">
      <h2 id="targets">Targets</h2>
      <div class="scroll" tabindex="0" role="region" aria-labelledby="targets"><table class="targets">
        <thead><tr><th scope="col">Target</th><th scope="col" class="num">Goal</th><th scope="col" class="num">Measured</th><th scope="col">Met</th><th scope="col">What is measured</th></tr></thead>
        <tbody>${targets.map((target) => html`
          <tr data-target=${target.name}>
            <th scope="row">${words(target.name)}</th>
            <td class="num" data-word="goal">${target.better === "lower" ? "<" : ">"} ${format.withUnit(target.goal, target.unit)}</td>
            <td class="num" data-word="measured">${target.measured == null ? "not available" : format.withUnit(target.measured, target.unit, target.goal)}</td>
            <td><${Met} met=${target.met} /></td>
            <td class="muted">${target.what}</td>
          </tr>`)}</tbody>
      </table></div>
    </section>`;
}

function Met({ met }) {
  const [kind, word] = met == null ? ["idle", "not known"] : met ? ["ok", "yes"] : ["bad", "no"];
  return html`<span class="state ${kind}"><${Mark} kind=${kind} /> ${word}</span>`;
}
