// Templates. Every value in a template becomes text or an attribute, never markup.
import { h, render, Component } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { render, Component };
