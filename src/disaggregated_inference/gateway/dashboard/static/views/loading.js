// A view that shows one answer of the gateway, and asks again when requests ended. `show` depends on the answer, the
// path and the theme alone.
import { Component, html } from "../html.js";
import { getJson } from "../api.js";

const AGAIN_MS = 5000;
const IDLE_MS = 30000;

export class Loaded extends Component {
  state = { found: null, of: "", error: "" }; // `of`: the path that was answered

  componentDidMount() {
    this.props.store.requestListeners.add(this.soon);
    this.load();
  }

  // What it shows is drawn again when that changes, not whenever a request ends: a hundred rows, or twelve charts.
  shouldComponentUpdate({ path, theme }, state) {
    return state !== this.state || path !== this.props.path || theme !== this.props.theme;
  }

  componentDidUpdate(before) {
    if (before.path !== this.props.path) this.load();
  }

  componentWillUnmount() {
    this.props.store.requestListeners.delete(this.soon);
    clearTimeout(this.timer);
    this.gone = true;
  }

  soon = () => this.schedule(AGAIN_MS);

  schedule(wait) {
    const at = Date.now() + wait;
    if (this.timer && this.timerAt <= at) return;
    clearTimeout(this.timer);
    this.timerAt = at;
    this.timer = setTimeout(() => this.load(), wait);
  }

  async load() {
    clearTimeout(this.timer);
    this.timer = 0;
    const { path, store } = this.props;
    try {
      const found = await getJson(path, { key: store.key });
      if (!this.gone && path === this.props.path) this.setState({ found, of: path, error: "" });
    } catch (error) {
      if (!this.gone) this.setState({ error: error.message });
    }
    if (!this.gone) this.schedule(IDLE_MS);
  }

  render({ show, what, path }, { found, of, error }) {
    return html`
      ${error && html`<p class="banner bad" role="alert"><span aria-hidden="true">✕</span> ${what} cannot be shown: ${error}</p>`}
      ${!found && !error && html`<p class="notice" role="status">Reading: ${what.toLowerCase()}.</p>`}
      ${found && of !== path && !error && html`<p class="reading" role="status">Reading: ${what.toLowerCase()}.</p>`}
      ${found && show(found)}`;
  }
}
