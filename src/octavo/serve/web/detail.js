/** One request: what it cost, its life so far, and its block table. */

import { get, Refusal } from "./api.js";
import { palette } from "./colours.js";
import { at, count, h, seconds, svg, whole } from "./dom.js";
import { STATE_BITS, STATES } from "./frames.js";
import { swatch } from "./pool.js";
import { linked } from "./requests.js";

const MS = 1000;
const WIDTH = 600;
const HEIGHT = 64;

export class Detail {
  /** `onChosen` is told the id of another request, `onClosed` when none is chosen any more. */
  constructor(onChosen, onClosed) {
    this.onChosen = onChosen;
    this.onClosed = onClosed;
    this.element = at("detail");
    this.id = null;
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.id !== null) this.close();
    });
    setInterval(() => this.#refresh(), MS);
  }

  async open(id) {
    this.back ??= document.activeElement;
    this.id = id;
    this.told = null;
    this.row = null;
    this.#build();
    this.element.hidden = false;
    this.element.focus();
    if (this.frame) this.show(this.frame);
    await this.#ask();
  }

  close() {
    this.id = null;
    this.element.hidden = true;
    this.back?.focus?.();
    this.back = null;
    this.onClosed();
  }

  /** Show the tables of the request in this picture. */
  show(frame) {
    this.frame = frame;
    if (this.id === null) return;
    const own = (row) => row.id === this.id || row.id === this.told?.id;
    const row = frame.running.find(own) ?? frame.waiting.find(own) ?? null;
    const before = this.row;
    this.row = row;
    if (row?.reason !== before?.reason) {
      this.parts.reason.replaceChildren(...linked(row?.reason ?? "", this.onChosen));
    }
    if (row || before) this.#tables(row, frame);
  }

  // --- the frame of the panel

  #build() {
    this.parts = {
      title: h("h2", { id: "detail-title" }, swatch(this.id, null, palette().dark), h("code", {}, this.id)),
      phase: h("span", { class: "phase" }),
      reason: h("p", { class: "reason" }),
      figures: h("dl", { class: "figures" }),
      picture: h("div", { class: "picture" }),
      story: h("ol", { class: "story" }),
      tables: h("div", { class: "tables" }),
      tablesFacts: h("span", { class: "quiet" }),
    };
    this.element.replaceChildren(
      h("div", { class: "head" }, this.parts.title, this.parts.phase,
        h("button", { type: "button", class: "plain", "aria-label": "Close", title: "Close (Esc)", onclick: () => this.close() }, "✕")),
      this.parts.reason,
      this.parts.figures,
      h("h3", {}, "Life"), this.parts.picture, this.parts.story,
      h("h3", {}, "Block table ", this.parts.tablesFacts), this.parts.tables,
    );
  }

  // --- its life

  async #refresh() {
    if (this.id === null || document.hidden || (this.told && this.told.ended_s !== null)) return;
    await this.#ask();
  }

  async #ask() {
    const id = this.id;
    try {
      const { request } = await get(`/debug/requests/${encodeURIComponent(id)}`);
      if (this.id !== id) return;
      this.told = request;
      this.#tell(request);
    } catch (error) {
      if (this.id !== id) return;
      const words = error instanceof Refusal ? error.message : "the server cannot be reached";
      this.parts.story.replaceChildren(h("li", {}, h("span", {}, words)));
    }
  }

  #tell(told) {
    this.parts.phase.textContent = told.state;
    this.parts.phase.className = `phase ${told.state}`;
    const figures = [
      ["prompt", `${count(told.prompt_tokens, "token")}, ${whole(told.cached_tokens)} cached`],
      ["answer", count(told.answer_tokens, "token")],
      ["queued", told.queued_s === null ? "still" : seconds(told.queued_s)],
      ["first token", told.first_token_s === null ? "not yet" : `after ${seconds(told.first_token_s)}`],
      ["ended", told.ended_s === null ? "not yet" : `after ${seconds(told.ended_s)}`],
      ["preempted", told.preemptions ? `${count(told.preemptions, "time")}, ${whole(told.swaps)} by swap` : "never"],
      ["evictions", told.evictions ? count(told.evictions, "cached block") : "none"],
      ["most blocks", whole(told.peak_blocks)],
    ];
    this.parts.figures.replaceChildren(...figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.parts.picture.replaceChildren(picture(told));
    this.parts.story.replaceChildren(...told.story.map((sentence) =>
      h("li", {}, h("time", {}, seconds(sentence.at_s)), h("span", {}, linked(sentence.text, this.onChosen)))));
  }

  // --- its tables

  #tables(row, frame) {
    const tables = row?.tables ?? [];
    const entries = tables.reduce((sum, { blocks }) => sum + blocks.length, 0);
    this.parts.tablesFacts.textContent = entries ? count(entries, "block") : row ? "none while it waits" : "given back";
    if (tables.some(({ blocks }) => blocks.length)) {
      this.parts.tables.replaceChildren(...tables.map((table, group) => this.#table(table, group, frame)));
    } else {
      this.parts.tables.replaceChildren();
    }
  }

  #table({ first, blocks }, group, frame) {
    const { block_size: size, windows, cells } = frame;
    const window = windows[group];
    const name = windows.length > 1 ? h("h4", {}, `Group ${group}, ${window === null ? "sees all" : `window of ${window}`}`) : null;
    const absent = first ? h("li", { class: "absent", title: "outside the window: given back" }, `${whole(first)} given back`) : null;
    const list = h("ol", { class: "entries" }, absent, [...blocks].map((block, n) => {
      const start = (first + n) * size;
      const state = STATES[cells[block] & STATE_BITS];
      const where = `positions ${whole(start)}–${whole(start + size - 1)}: block ${whole(block)}, ${state}`;
      return h("li", { class: state, title: where }, String(block));
    }));
    return h("section", {}, name, list);
  }
}

/** Phases as a strip, and the blocks it held over it. */
function picture(told) {
  const end = told.ended_s ?? Math.max(0, ...told.story.map(({ at_s: at, for_s: length }) => at + length), told.phases.at(-1)?.[0] ?? 0);
  if (!(end > 0)) return h("p", { class: "quiet" }, "It has just come.");
  const x = (atS) => (WIDTH * Math.min(atS, end)) / end;
  const strip = told.phases.map(([start, phase], n) => {
    const stop = told.phases[n + 1]?.[0] ?? end;
    return svg("rect", { class: phase, x: x(start), y: HEIGHT + 4, width: Math.max(0, x(stop) - x(start)), height: 8 },
      svg("title", {}, `${phase}, ${seconds(stop - start)}`));
  });
  const top = Math.max(1, told.peak_blocks);
  const y = (blocks) => HEIGHT - (blocks / top) * (HEIGHT - 2);
  let path = `M0 ${HEIGHT}`;
  let held = 0;
  for (const [atS, blocks] of told.blocks) {
    path += `L${x(atS).toFixed(1)} ${y(held).toFixed(1)}L${x(atS).toFixed(1)} ${y(blocks).toFixed(1)}`;
    held = blocks;
  }
  path += `L${WIDTH} ${y(held).toFixed(1)}L${WIDTH} ${HEIGHT}Z`;
  const used = [...new Set(told.phases.map(([, phase]) => phase))].filter((phase) => phase !== "ended");
  return h("div", {},
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 13}`, preserveAspectRatio: "none", role: "img", "aria-label": `Blocks held and phases over ${seconds(end)}, at most ${count(top, "block")}` },
      svg("path", { class: "held-blocks", d: path }), ...strip),
    h("p", { class: "quiet axis" }, h("span", {}, "0"),
      ...used.map((phase) => h("span", {}, h("i", { class: `swatch phase-${phase}` }), phase)), h("span", {}, seconds(end))));
}
