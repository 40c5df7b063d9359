// A prompt to a model, streamed, with its waterfall; and the same prompt on the decode machine alone beside it.
import { Component, html } from "../html.js";
import { call, events } from "../api.js";
import * as format from "../format.js";
import { Facts, Reasons, Waterfall } from "./waterfall.js";

const DRAW_MS = 120;
const SAMPLE = "Explain in a few sentences why reading a prompt and writing an answer need different machines.";
const COPIES = 40; // of the sample, for a prompt that is worth handing over

// One after the other: at once, each would slow the other down.
const RUNS = {
  handover: { title: "Handed over", about: "a prefill node reads, a decode node writes" },
  local: { title: "One machine alone", about: "the decode node reads and writes" },
  auto: { title: "As the router chooses", about: "the fastest way by its estimate" },
};

const fresh = () => ({ state: "waiting", text: "", record: null, error: "" });

export class Playground extends Component {
  constructor({ store }) {
    super();
    store.draft ||= { model: Object.keys(store.status.models)[0], prompt: SAMPLE, tokens: 100, compare: store.seesAll, runs: [] };
    this.draft = store.draft;
  }

  componentWillUnmount() {
    this.stopped?.abort();
    clearTimeout(this.drawing);
  }

  change = (changes) => {
    Object.assign(this.draft, changes);
    this.setState({});
  };

  drawSoon() {
    this.drawing ||= setTimeout(() => {
      this.drawing = 0;
      this.setState({});
    }, DRAW_MS);
  }

  hasPrefill = () => this.props.store.status.nodes.some((node) => node.model === this.draft.model && node.role !== "decode" && node.usable);

  submit = async (event) => {
    event.preventDefault();
    const stopped = (this.stopped = new AbortController());
    const kinds = this.compares() ? [this.hasPrefill() ? "handover" : "auto", "local"] : ["auto"];
    const runs = kinds.map((kind) => ({ kind, ...fresh() }));
    this.change({ runs, busy: true });
    for (const run of runs) {
      if (stopped.signal.aborted) run.state = "stopped";
      else await this.send(run, stopped.signal);
    }
    this.change({ busy: false });
  };

  // To force a way is for operators: it can be slower for all.
  compares = () => this.draft.compare && this.props.store.seesAll;

  async send(run, signal) {
    const { model, prompt, tokens } = this.draft;
    // Neither run may find the prompt in a prefix cache, and both write the likeliest tokens.
    const salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const body = { model, messages: [{ role: "user", content: prompt }], max_tokens: tokens, temperature: 0, stream: true, include_metrics: true, cache_salt: salt };
    const headers = this.compares() ? { "X-Disagg-Route": run.kind } : {};
    run.state = "running";
    this.setState({});
    try {
      const response = await call("v1/chat/completions", { key: this.props.store.key, method: "POST", body, headers, signal });
      for await (const { data } of events(response)) if (data !== "[DONE]") this.take(run, JSON.parse(data));
      run.state = run.error ? "failed" : "done";
    } catch (error) {
      Object.assign(run, signal.aborted ? { state: "stopped" } : { state: "failed", error: error.message });
    }
    this.setState({});
  }

  take(run, chunk) {
    if (chunk.error) run.error = chunk.error.message;
    if (chunk.disagg) run.record = chunk.disagg;
    const delta = chunk.choices?.[0]?.delta || {};
    run.text += delta.reasoning_content || "";
    run.text += delta.content || "";
    this.drawSoon();
  }

  render({ store }) {
    const { draft } = this;
    return html`
      <section class="panel" aria-labelledby="playground">
        <h2 id="playground">Playground</h2>
        <form class="playground" onSubmit=${this.submit}>
          <div class="fields">
            <div><label for="play-model">Model</label><select id="play-model" value=${draft.model} onChange=${(event) => this.change({ model: event.target.value })}>
              ${Object.keys(store.status.models).map((model) => html`<option value=${model}>${model}</option>`)}
            </select></div>
            <div><label for="play-tokens">Longest answer, tokens</label><input id="play-tokens" type="number" min="1" max="4000" value=${draft.tokens} onInput=${(event) => this.change({ tokens: Number(event.target.value) || 1 })} /></div>
            ${store.seesAll
              ? html`<div class="check"><input id="play-compare" type="checkbox" checked=${draft.compare} onChange=${(event) => this.change({ compare: event.target.checked })} /><label for="play-compare">Compare with one machine alone</label></div>`
              : html`<p class="muted fine">Comparing with one machine alone needs an operator's key.</p>`}
          </div>
          <label for="play-prompt">Prompt</label>
          <textarea id="play-prompt" rows="5" required value=${draft.prompt} onInput=${(event) => this.change({ prompt: event.target.value })}></textarea>
          <div class="buttons">
            <button type="submit" class="primary" disabled=${draft.busy}>${draft.busy ? "Running" : "Send"}</button>
            ${draft.busy && html`<button type="button" onClick=${() => this.stopped.abort()}>Stop</button>`}
            <button type="button" class="quiet" disabled=${draft.busy} onClick=${() => this.change({ prompt: Array(COPIES).fill(SAMPLE).join("\n") })}>Use a long sample</button>
            <span class="muted">Prompts are not kept: not in the history, not in the page's address.</span>
          </div>
        </form>
      </section>
      <${Verdict} runs=${draft.runs} />
      <div class="runs">${draft.runs.map((run) => html`<${Run} key=${run.kind} run=${run} scale=${scaleOf(draft.runs)} />`)}</div>`;
  }
}

// One scale for both waterfalls: a bar that is twice as long took twice as long.
const scaleOf = (runs) => (runs.length > 1 ? Math.max(...runs.map((run) => run.record?.total_time || 0)) : 0);

function Verdict({ runs }) {
  const [together, alone] = runs.map((run) => run.record);
  if (runs.length < 2 || !together || !alone) return null;
  const first = alone.first_token_time / together.first_token_time;
  const whole = alone.total_time / together.total_time;
  const same = runs[0].text === runs[1].text;
  const line = (ratio, what) => (ratio >= 1 ? `${what} ${format.times(ratio)} sooner` : `${what} ${format.times(1 / ratio)} later`);
  return html`<p class="banner ${first >= 1 && whole >= 1 ? "ok" : "warn"}" role="status" id="play-verdict">Handed over: ${line(first, "first token")}, ${line(whole, "whole answer")} than on one machine alone. The two answers are ${same ? "the same, character for character" : "different"}.</p>`;
}

const STATES = { waiting: "waits for the other one", running: "running", done: "done", failed: "failed", stopped: "stopped" };

function Run({ run, scale }) {
  const { title, about } = RUNS[run.kind];
  const { record } = run;
  return html`
    <article class="panel run" data-run=${run.kind} data-state=${run.state}>
      <h2>${title}</h2>
      <p class="under">${about} · ${STATES[run.state]}${record ? `, took ${format.seconds(record.total_time)}` : ""}</p>
      ${run.error && html`<p class="bad" role="alert"><span aria-hidden="true">✕</span> ${run.error}</p>`}
      <pre class="answer" tabindex="0" role="region" aria-label="Answer: ${title}" aria-busy=${run.state === "running"}>${run.text || (run.state === "running" ? "reading the prompt" : "")}</pre>
      ${record && html`<${Reasons} record=${record} /><div class="scroll"><${Waterfall} record=${record} scale=${scale} /></div><${Facts} record=${record} />`}
    </article>`;
}
