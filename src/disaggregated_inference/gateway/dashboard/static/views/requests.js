// The history of requests, with filters.
import { Component, html } from "../html.js";
import { Choice, RANGES } from "./choices.js";
import { Loaded } from "./loading.js";
import { RequestTable } from "./overview.js";
import { given } from "./overtime.js";

const EACH = 100;
const OUTCOMES = [["", "all"], ["ok", "ok"], ["failed", "failed"], ["refused", "refused"], ["cancelled", "cancelled"]];

export class Requests extends Component {
  state = { range: "24h", model: "", node: "", outcome: "", limit: EACH };

  render({ store, open }, chosen) {
    const { status } = store;
    const among = (all, names) => [["", all], ...names.map((each) => [each, each])];
    const choose = (changes) => this.setState({ limit: EACH, ...changes });
    const show = (found) => html`
      <${RequestTable} title="Requests" records=${inOrder(found.requests)} open=${open} dated=${true} empty=${found.kept.requests ? "None of the kept requests is of this time and selection." : undefined} />
      <p class="muted">${found.requests.length} shown. ${kept(found)} ${found.more && chosen.limit < 1000 && html`<button type="button" onClick=${() => this.setState({ limit: Math.min(1000, chosen.limit + 300) })}>Show more</button>`}</p>`;
    return html`
      <section class="panel"><div class="fields">
        <${Choice} id="request-range" label="Time" value=${chosen.range} options=${RANGES} choose=${(range) => choose({ range })} />
        <${Choice} id="request-model" label="Model" value=${chosen.model} options=${among("all models", Object.keys(status.models))} choose=${(model) => choose({ model })} />
        <${Choice} id="request-node" label="Node" value=${chosen.node} options=${among("all nodes", status.nodes.map((node) => node.name))} choose=${(node) => choose({ node })} />
        <${Choice} id="request-outcome" label="Outcome" value=${chosen.outcome} options=${OUTCOMES} choose=${(outcome) => choose({ outcome })} />
      </div></section>
      <${Loaded} store=${store} path="cluster/history?${new URLSearchParams(given(chosen))}" what="The requests" show=${show} />`;
  }
}

// The newest first; those that came within one second, which is all that is shown, by their numbers.
function inOrder(requests) {
  return [...requests].sort((one, other) => Math.floor(other.time) - Math.floor(one.time) || (other.number || 0) - (one.number || 0));
}

function kept({ kept: about }) {
  const where = about.file ? "in a file: disagg history --csv, or --json, exports them" : "in memory only: name policies.history_file in the cluster file to keep them over a restart";
  return `${about.requests.toLocaleString("en-US")} are kept, ${where}.`;
}
