// Ready configurations for programs, with this gateway's address.
import { Component, html } from "../html.js";

// As a shell takes it.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const base = () => new URL(".", location.href).href.replace(/\/$/, "");

// Each: name, where the text goes, the text. docs/CLIENTS.md has more of them.
const CLIENTS = [
  ["curl", "a terminal", (url, model, key) => `curl ${url}/v1/chat/completions \\
  -H 'Authorization: Bearer ${key}' -H 'Content-Type: application/json' \\
  -d ${quoted(JSON.stringify({ model, messages: [{ role: "user", content: "Why is the sky blue?" }] }))}`],
  ["OpenAI SDK", "Python", (url, model, key) => `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${url}/v1`)}, api_key=${JSON.stringify(key)})
question = [{"role": "user", "content": "Why is the sky blue?"}]
answer = client.chat.completions.create(model=${JSON.stringify(model)}, messages=question)
print(answer.choices[0].message.content)`],
  ["Open WebUI", "environment of its server, or Admin settings, Connections", (url, model, key) => `OPENAI_API_BASE_URL=${url}/v1
OPENAI_API_KEY=${key}`],
  ["Continue", "config.yaml", (url, model, key) => `name: cluster
version: 0.0.1
schema: v1
models:
  - name: ${JSON.stringify(model)}
    provider: openai
    model: ${JSON.stringify(model)}
    apiBase: ${url}/v1
    apiKey: ${key}`],
  ["aider", "a terminal", (url, model, key) => `export OPENAI_API_BASE=${url}/v1
export OPENAI_API_KEY=${key}
aider --model ${quoted(`openai/${model}`)}`],
  ["Claude Code", "a terminal", (url, model, key) => `export ANTHROPIC_BASE_URL=${url}
export ANTHROPIC_AUTH_TOKEN=${key}
export ANTHROPIC_MODEL=${quoted(model)}
export ANTHROPIC_SMALL_FAST_MODEL=${quoted(model)}
claude`],
];

// Browsers keep the clipboard from pages without HTTPS, and a gateway in a local network often has none. What is selected
// can be copied there all the same; if not, it is ready for the keyboard.
function copySelected(name) {
  getSelection().selectAllChildren(document.querySelector(`[data-client="${name}"] pre`));
  return document.execCommand("copy");
}

export class Clients extends Component {
  state = { model: "", copied: {} };

  copy = async (name, text) => {
    try {
      await navigator.clipboard.writeText(text);
      this.setState({ copied: { [name]: "copied" } });
    } catch {
      this.setState({ copied: { [name]: copySelected(name) ? "copied" : "selected" } });
    }
  };

  render({ store }, { model, copied }) {
    const models = Object.keys(store.status.models);
    const chosen = model || models[0];
    const key = store.key ? "YOUR_KEY" : "none";
    return html`
      <section class="panel">
        <h2>Connect a program</h2>
        <p class="muted">This gateway is <code>${base()}</code>: OpenAI's API under <code>/v1</code>, those of Anthropic and Ollama at its root. ${store.key ? "Put an API key in place of YOUR_KEY." : "It needs no key; programs that insist on one take any."}</p>
        <div class="fields below"><div><label for="client-model">Model</label><select id="client-model" value=${chosen} onChange=${(event) => this.setState({ model: event.target.value })}>
          ${models.map((each) => html`<option value=${each}>${each}</option>`)}
        </select></div></div>
      </section>
      <div class="snippets">${CLIENTS.map(([name, place, write]) => {
        const text = write(base(), chosen, key);
        return html`
          <section class="panel" aria-label=${name} data-client=${name}>
            <h2>${name} <button type="button" class="quiet" onClick=${() => this.copy(name, text)} aria-label="Copy the configuration of ${name}">${copied[name] || "copy"}</button></h2>
            <p class="under">${place}</p>
            <pre tabindex="0" role="region" aria-label="Configuration of ${name}">${text}</pre>
          </section>`;
      })}</div>`;
  }
}
