/** The lists of requests: who runs, who waits, each with the reason, and who has ended. */

import { get } from "./api.js";
import { palette } from "./colours.js";
import { at, count, h, seconds, short, whole, write } from "./dom.js";
import { swatch } from "./pool.js";

const ENDED_MS = 5000;
const MOST_ENDED = 50;

const PHASES = { waiting: "waits", prefill: "prefill", decode: "decode", preempted: "preempted" };

export class Requests {
  /** `onChosen` is told the id of a request. */
  constructor(onChosen) {
    this.onChosen = onChosen;
    this.rows = new Map();
    this.chosen = null;
    at("ended-part").addEventListener("toggle", () => this.#ended());
    setInterval(() => this.#ended(), ENDED_MS);
  }

  /** Show who runs and who waits. */
  show(frame) {
    this.dark = palette().dark;
    const seen = new Set();
    this.#list(at("running"), frame.running, seen, frame);
    this.#list(at("waiting"), frame.waiting, seen, frame);
    for (const id of this.rows.keys()) if (!seen.has(id)) this.rows.delete(id);
    write(at("running-facts"), facts(frame.running.length, frame.running.length));
    write(at("waiting-facts"), facts(frame.waiting.length, frame.waiting_total));
  }

  choose(id) {
    this.chosen = id;
    for (const [name, row] of this.rows) row.element.firstChild.setAttribute("aria-current", String(name === id));
  }

  #list(list, rows, seen, frame) {
    const elements = rows.map((row) => {
      seen.add(row.id);
      if (!this.rows.has(row.id)) this.rows.set(row.id, this.#made(row));
      const kept = this.rows.get(row.id);
      fill(kept, row, frame);
      return kept.element;
    });
    if (!elements.length) elements.push(empty(list.id === "running" ? "Nothing runs." : "Nobody waits."));
    elements.forEach((element, place) => {
      if (list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null);
    });
    while (list.children.length > elements.length) list.lastChild.remove();
  }

  #made({ id }) {
    const parts = {
      phase: h("span", { class: "phase" }),
      cached: h("i", { class: "cached" }),
      computed: h("i", { class: "computed" }),
      answer: h("i", { class: "answer" }),
      tokens: h("span", { class: "figure", title: "prompt and answer tokens, of those it may have at most" }),
      blocks: h("span", { class: "figure", title: "KV blocks in its tables" }),
      preempted: h("span", { class: "figure bad", title: "how often it was preempted" }),
      tenant: h("span", { class: "quiet" }),
      age: h("span", { class: "figure quiet", title: "since it came" }),
      reason: h("span", { class: "reason" }),
    };
    const element = h("li", {},
      h("button", { type: "button", class: "row", "aria-current": String(id === this.chosen), onclick: () => this.onChosen(id) },
        h("span", { class: "name" }, swatch(id, null, this.dark), h("code", {}, brief(id)), parts.tenant),
        parts.phase,
        h("span", { class: "progress", "aria-hidden": "true", title: "found in the cache, computed, answer" }, parts.cached, parts.computed, parts.answer),
        parts.tokens, parts.blocks, parts.preempted, parts.age, parts.reason));
    return { element, parts };
  }

  // --- who has ended: asked for only while that part is open

  async #ended() {
    if (!at("ended-part").open || document.hidden) return;
    try {
      const { requests } = await get("/debug/requests", { quiet: true });
      const ended = requests.filter((one) => one.ended_s !== null).slice(-MOST_ENDED).reverse();
      const rows = ended.map((one) => this.#endedRow(one));
      at("ended").replaceChildren(...(rows.length ? rows : [empty("Nothing has ended yet.")]));
    } catch (error) {
      at("ended").replaceChildren(empty(error.message));
    }
  }

  #endedRow(told) {
    const times = [
      told.queued_s !== null && `queued ${seconds(told.queued_s)}`,
      told.first_token_s !== null && `first token after ${seconds(told.first_token_s)}`,
      `ended after ${seconds(told.ended_s)}`,
    ].filter(Boolean).join(", ");
    return h("li", {},
      h("button", { type: "button", class: "row", onclick: () => this.onChosen(told.id) },
        h("span", { class: "name" }, h("code", {}, brief(told.id))),
        h("span", { class: `phase ${told.state}` }, told.state),
        h("span", { class: "reason" }, times),
        h("span", { class: "figure" }, `${short(told.prompt_tokens)} + ${short(told.answer_tokens)}`),
        h("span", { class: "figure" }, count(told.peak_blocks, "block")),
        h("span", { class: "figure bad" }, told.preemptions ? `${told.preemptions}×` : "")));
  }
}

function fill({ parts }, row, frame) {
  const blocks = row.tables.reduce((sum, table) => sum + (table.blocks?.length ?? 0), 0);
  write(parts.phase, PHASES[row.phase] ?? row.phase);
  parts.phase.className = `phase ${row.phase}`;
  write(parts.tenant, [row.tenant, row.priority ? `priority ${row.priority}` : ""].filter(Boolean).join(", "));
  write(parts.tokens, `${whole(row.prompt_tokens + row.answer_tokens)} / ${whole(row.most_tokens)}`);
  write(parts.blocks, blocks ? count(blocks, "block") : row.swapped_tokens ? `${short(row.swapped_tokens)} swapped` : "");
  write(parts.preempted, row.preemptions ? `${row.preemptions}×` : "");
  write(parts.age, seconds(row.age_s));
  write(parts.reason, shortened(row.reason));
  const cached = Math.min(row.cached_tokens, row.computed);
  const prompt = Math.max(0, Math.min(row.computed, row.prompt_tokens) - cached);
  const answer = Math.max(0, row.computed - row.prompt_tokens);
  for (const [part, tokens] of [[parts.cached, cached], [parts.computed, prompt], [parts.answer, answer]]) {
    part.style.width = `${(100 * tokens) / row.most_tokens}%`;
  }
}

const facts = (listed, all) => (all > listed ? `${whole(listed)} of ${whole(all)}` : all ? whole(all) : "");

const empty = (text) => h("li", { class: "empty quiet" }, text);

const ID = /\b[0-9a-f]{32}(#\d+)?/g;

/** A text with enough of each id that the server made. */
const shortened = (text) => text.replace(ID, brief);

/** A text as nodes, in which the ids that the server made lead to their requests. */
export function linked(text, onChosen) {
  const nodes = [];
  let place = 0;
  for (const match of text.matchAll(ID)) {
    const [id] = match;
    nodes.push(text.slice(place, match.index));
    nodes.push(h("button", { type: "button", class: "link", title: id, onclick: () => onChosen(id) }, h("code", {}, brief(id))));
    place = match.index + id.length;
  }
  return [...nodes, text.slice(place)];
}

/** Enough of an id to tell it from others. */
export function brief(id) {
  const [request, branch] = id.split("#");
  const head = request.length > 12 ? `${request.slice(0, 8)}…` : request;
  return branch === undefined ? head : `${head}#${branch}`;
}
