// The page: header, navigation, one view at a time, and a dialog with a request's waterfall.
import { Component, html, render } from "./html.js";
import { Store } from "./store.js";
import { Failure, Forbidden, Loading, Login } from "./views/states.js";
import { Overview } from "./views/overview.js";
import { ClusterView } from "./views/picture.js";
import { RequestDialog } from "./views/waterfall.js";
import { OverTime } from "./views/overtime.js";
import { Requests } from "./views/requests.js";
import { Targets } from "./views/targets.js";
import { Energy } from "./views/energy.js";
import { Playground } from "./views/playground.js";
import { Clients } from "./views/clients.js";
import { verdictKind } from "./views/marks.js";

const VIEWS = [
  { id: "overview", name: "Overview", view: Overview },
  { id: "cluster", name: "Cluster", view: ClusterView },
  { id: "requests", name: "Requests", view: Requests },
  { id: "time", name: "Over time", view: OverTime },
  { id: "targets", name: "Targets", view: Targets },
  { id: "energy", name: "Energy", view: Energy },
  { id: "playground", name: "Playground", view: Playground },
  { id: "clients", name: "Clients", view: Clients },
];
const PHASES = { live: ["ok", "Live"], reconnecting: ["bad", "Reconnecting"], loading: ["idle", "Connecting"], unauthorised: ["idle", "Key needed"], forbidden: ["bad", "Not allowed"] };
const THEMES = { auto: "dark", dark: "light", light: "auto" };

class App extends Component {
  constructor() {
    super();
    this.store = new Store();
    this.store.listener = () => this.setState({});
    this.state = { view: viewOfHash(), theme: document.documentElement.dataset.theme || "auto", opened: null };
    addEventListener("hashchange", () => this.setState({ view: viewOfHash() }));
  }

  componentDidMount() {
    this.store.start();
  }

  open = (record) => this.setState({ opened: record });
  close = () => this.setState({ opened: null });

  changeTheme = () => {
    const theme = THEMES[this.state.theme];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      if (theme === "auto") localStorage.removeItem("disagg-theme");
      else localStorage.setItem("disagg-theme", theme);
    } catch {
      // It holds until the page is left.
    }
    this.setState({ theme });
  };

  render(_, { view, theme, opened }) {
    const { store } = this;
    return html`
      <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
      <${Header} store=${store} view=${view} theme=${theme} changeTheme=${this.changeTheme} />
      <main id="main" tabindex="-1">${this.content(view)}</main>
      ${opened && html`<${RequestDialog} record=${opened} store=${store} close=${this.close} />`}`;
  }

  content(view) {
    const { store } = this;
    if (store.phase === "unauthorised") return html`<${Login} store=${store} />`;
    if (store.phase === "forbidden") return html`<${Forbidden} store=${store} />`;
    if (store.phase === "error") return html`<${Failure} message=${store.message} />`;
    if (!store.status) return html`<${Loading} />`;
    const shown = VIEWS.find((each) => each.id === view) || VIEWS[0];
    return html`
      ${store.phase === "reconnecting" && html`<p class="banner bad" role="alert"><span aria-hidden="true">✕</span> Reconnecting: ${store.message}. The figures below are the last known ones.</p>`}
      ${!store.seesAll && html`<p class="muted" id="own">This key sees its own requests, and figures of these alone. An operator's key sees all.</p>`}
      <${shown.view} key=${shown.id} store=${store} open=${this.open} theme=${this.state.theme} />`;
  }
}

function Header({ store, view, theme, changeTheme }) {
  const [kind, word] = PHASES[store.phase] || ["bad", "Not connected"];
  const verdict = store.status?.verdict;
  return html`
    <header>
      <h1><span class="dot prefill" aria-hidden="true"></span><span class="dot decode" aria-hidden="true"></span> Disaggregated inference</h1>
      ${verdict && html`<p class="verdict ${kind === "ok" ? verdictKind(store.status) : "idle"}" id="verdict">${kind === "ok" ? verdict + warned(store.status) : `last known: ${verdict}`}</p>`}
      <p class="connection ${kind}" role="status" aria-live="polite"><span class="mark" aria-hidden="true"></span>${word}</p>
      ${store.key && html`<button type="button" class="quiet" onClick=${() => store.logout()}>Log out</button>`}
      <button type="button" class="quiet" onClick=${changeTheme} aria-label="Theme: ${theme}. Change it.">◐ ${theme}</button>
      <nav aria-label="Views">
        ${VIEWS.map((each) => html`<a href="#${each.id}" aria-current=${each.id === view ? "page" : null}>${each.name}</a>`)}
      </nav>
    </header>`;
}

// They stand on the overview; the other views say how many.
const warned = ({ warnings }) => (warnings.length ? `, ${warnings.length} warning${warnings.length > 1 ? "s" : ""}` : "");

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function viewOfHash() {
  const id = location.hash.slice(1);
  return VIEWS.some((each) => each.id === id) ? id : VIEWS[0].id;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
