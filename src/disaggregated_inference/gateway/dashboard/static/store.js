// What the page knows of the cluster. `/cluster` at first, then the events of `/cluster/events`; after a lost connection
// both again. The page is drawn when this changes, and at no other time.
import { ApiError, call, events, getJson, storedKey, storeKey } from "./api.js";

const SHOWN = 50; // requests, as in /cluster
const SILENCE_MS = 15000; // of the gateway, which sends a status every 5 s
const RETRY_MS = [300, 600, 1200, 2500, 5000];
const SOON_MS = 60; // events that come together are drawn together
const DRAW_MS = 2000; // and the page is drawn this often at most: drawing is what costs

export class Store {
  constructor() {
    this.phase = "loading"; // loading, live, reconnecting, unauthorised, forbidden, error
    this.message = "";
    this.status = null;
    this.history = [];
    this.summary = null; // figures of the cards, as the gateway computes them
    this.seesAll = true; // false: requests, and all figures of requests, are those of this key
    this.flow = new Map(); // "prefill decode": bytes per second now
    this.key = storedKey();
    this.listener = () => {};
    this.requestListeners = new Set();
    this.tries = 0;
    this.drawing = 0;
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
  }

  start() {
    if (!document.hidden) this.run();
  }

  // A page that is not looked at costs the gateway nothing.
  visibilityChanged() {
    if (document.hidden) this.stop();
    else if (!this.running) this.run();
  }

  stop() {
    this.running?.abort();
    this.running = null;
    clearTimeout(this.retrying);
  }

  login(key) {
    this.key = key;
    storeKey(key);
    this.tries = 0;
    this.set({ phase: "loading", message: "" });
    this.stop();
    this.run();
  }

  logout() {
    this.stop();
    this.forget();
    this.set({ phase: "loading", message: "" });
    this.run();
  }

  forget() {
    this.key = "";
    storeKey("");
    this.status = null;
    this.history = [];
  }

  // A key that the gateway does not know is not kept: neither it nor what an earlier one saw.
  refused() {
    const message = this.key ? "The gateway does not know this key." : "";
    this.forget();
    this.set({ phase: "unauthorised", message });
  }

  // What the page is for changed: that is drawn at once.
  set(changes) {
    Object.assign(this, changes);
    this.draw();
  }

  changed() {
    if (!this.drawing) {
      const wait = Math.max(SOON_MS, (this.drawnAt || 0) + DRAW_MS - Date.now());
      this.drawing = setTimeout(() => this.draw(), wait);
    }
  }

  draw() {
    clearTimeout(this.drawing);
    this.drawing = 0;
    this.drawnAt = Date.now();
    this.listener();
  }

  async run() {
    clearTimeout(this.retrying);
    const running = (this.running = new AbortController());
    try {
      await this.load(running);
      await this.listen(running);
      this.lost("the gateway ended the connection");
    } catch (error) {
      if (running === this.running) this.failed(error);
    }
  }

  async load(running) {
    const watch = setTimeout(() => running.abort(), SILENCE_MS);
    try {
      const { history, summary, sees_all: seesAll, targets: _, ...status } = await getJson("cluster", { key: this.key, signal: running.signal });
      this.takeStatus(status);
      this.set({ history, summary, seesAll, phase: "live", message: "" });
    } finally {
      clearTimeout(watch);
    }
  }

  async listen(running) {
    let heard = Date.now();
    const watch = setInterval(() => Date.now() - heard > SILENCE_MS && running.abort(), SILENCE_MS / 3);
    try {
      const response = await call("cluster/events", { key: this.key, signal: running.signal });
      for await (const { event, data } of events(response)) {
        heard = Date.now();
        this.take(event, JSON.parse(data));
      }
    } finally {
      clearInterval(watch);
    }
  }

  take(event, content) {
    this.tries = 0; // not before: all places for events may be taken
    const before = statesOf(this.status);
    if (event === "status") this.takeStatus(content);
    if (event === "request") this.takeRequest(content);
    if (event === "summary") this.summary = content;
    if (statesOf(this.status) === before) this.changed();
    else this.draw(); // a node that fails or returns is shown at once
  }

  takeRequest(record) {
    this.history = [record, ...this.history.filter((each) => each.request_id !== record.request_id)].slice(0, SHOWN);
    for (const listener of this.requestListeners) listener(record);
  }

  takeStatus(status) {
    this.measureFlow(status.links);
    this.status = status;
  }

  // KV that arrived since the last status.
  measureFlow(links) {
    const now = Date.now();
    const before = new Map((this.status?.links || []).map((link) => [`${link.prefill} ${link.decode}`, link.payload_bytes]));
    for (const link of links) {
      const name = `${link.prefill} ${link.decode}`;
      const moved = before.has(name) ? link.payload_bytes - before.get(name) : 0;
      this.flow.set(name, moved > 0 ? (moved * 1000) / Math.max(now - this.statusAt, 500) : 0);
    }
    this.statusAt = now;
  }

  failed(error) {
    if (error instanceof ApiError && error.status === 401) return this.refused();
    if (error instanceof ApiError && error.status === 403) return this.set({ phase: "forbidden", message: error.message });
    this.lost(error instanceof ApiError ? error.message : "the gateway does not answer");
  }

  lost(message) {
    this.running = null;
    this.flow.clear();
    this.set({ phase: this.status ? "reconnecting" : "error", message });
    const wait = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)];
    this.tries += 1;
    this.retrying = setTimeout(() => this.run(), wait);
  }
}

const statesOf = (status) => JSON.stringify((status?.nodes || []).map((node) => [node.name, node.state, node.usable]));
