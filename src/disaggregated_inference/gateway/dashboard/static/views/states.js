// What is shown when there is no cluster to show.
import { Component, html } from "../html.js";

export const Loading = () => html`<p class="notice" role="status">Asking the gateway for the cluster's state.</p>`;

export const Failure = ({ message }) => html`
  <section class="notice" role="alert">
    <h2>The gateway cannot be reached</h2>
    <p>${message}. The page tries again by itself.</p>
    <p>If it stays so: is <code>disagg gateway</code> running at <code>${location.origin}</code>?</p>
  </section>`;

export const Forbidden = ({ store }) => html`
  <section class="notice" role="alert">
    <h2>This key may not see the cluster</h2>
    <p>${store.message}.</p>
    <p>The dashboard shows all models and machines. Use a key without a list of models.</p>
    <button type="button" onClick=${() => store.logout()}>Use another key</button>
  </section>`;

export class Login extends Component {
  submit = (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get("key").trim();
    if (key) this.props.store.login(key);
  };

  render({ store }) {
    return html`
      <section class="notice">
        <h2>This gateway needs an API key</h2>
        <form onSubmit=${this.submit}>
          <label for="key">API key</label>
          <input id="key" name="key" type="password" autocomplete="off" spellcheck=${false} required placeholder="sk-disagg-…" />
          <button type="submit">Open the dashboard</button>
        </form>
        ${store.message && html`<p class="bad" role="alert"><span aria-hidden="true">✕</span> ${store.message}</p>`}
        <p class="muted">The key stays in this tab and is forgotten when the tab is closed. <code>disagg gateway key NAME --operator</code> makes one that sees the requests of all keys.</p>
      </section>`;
  }
}
