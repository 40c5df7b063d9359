import { html } from "../html.js";

export const RANGES = [["15m", "15 minutes"], ["1h", "1 hour"], ["6h", "6 hours"], ["24h", "24 hours"], ["7d", "7 days"], ["30d", "30 days"]];

export const Choice = ({ id, label, value, options, choose }) => html`
  <div><label for=${id}>${label}</label><select id=${id} value=${value} onChange=${(event) => choose(event.target.value)}>
    ${options.map(([each, name]) => html`<option key=${each} value=${each} selected=${each === value}>${name}</option>`)}
  </select></div>`;
