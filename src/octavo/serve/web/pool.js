/** The live pool: a cell a block, coloured by its state or by the request that owns it. */

import { get } from "./api.js";
import { colourOf, palette } from "./colours.js";
import { at, count, h, seconds, whole, write } from "./dom.js";
import { MOVING, PINNED, STATE_BITS, STATES } from "./frames.js";
import { cellAt, drawCell, layout, mixed, placeOf, rgb } from "./grid.js";

const [FREE, CACHED, OWNED, SHARED, HELD, FENCED] = STATES.keys();

const MEANING = [
  "nobody's, without content",
  "nobody's now, its content kept for prompts that begin so",
  "in the table of one request",
  "in the tables of several requests",
  "kept for requests to come, by a pin or a session",
  "given up, and on its way to the swap space",
];

const MOST_FLASHES = 800;
const FLASH_MS = 700;
const ASK_AFTER_MS = 90;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class PoolView {
  /** `onOwner` is told the id of a request whose block was chosen. */
  constructor(onOwner) {
    this.onOwner = onOwner;
    this.canvas = at("pool");
    this.context = this.canvas.getContext("2d");
    this.tip = at("tip");
    this.frame = null;
    this.byRequest = false;
    this.request = null;
    this.only = null;
    this.colours = palette();
    this.looks = [];
    this.flashes = new Map();
    this.cursor = -1;
    this.asked = { block: -1, at: 0, told: null };
    this.#listen();
    this.#legend();
  }

  /** Show another picture. */
  show(frame) {
    const before = this.frame;
    this.frame = frame;
    this.#own();
    if (!this.grid || before?.blocks !== frame.blocks) this.fit();
    else this.#draw(before.cells);
    this.#count();
    if (this.cursor >= 0) this.#say(this.cursor);
  }

  /** Dim all blocks but those of this request; none for null. */
  choose(id) {
    if (this.request === id) return;
    this.request = id;
    this.redraw();
  }

  /** Lay all out anew, for another width or other colours. */
  fit() {
    if (!this.frame) return;
    this.colours = palette();
    const area = this.canvas.parentElement;
    const width = area.clientWidth;
    if (!width) return;
    this.grid = layout(this.frame.blocks, width, Math.max(180, Math.min(360, innerHeight * 0.42)));
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.grid.height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.grid.height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.mixes = this.colours.states.map((colour) => rgb(this.context, colour));
    const { block_size: size, blocks } = this.frame;
    const per = this.grid.per > 1 ? `; a cell is ${count(this.grid.per, "block")}` : "";
    write(at("pool-facts"), `${count(blocks, "block")} of ${size} tokens${per}`);
    this.redraw();
  }

  /** Draw every cell again. */
  redraw() {
    this.looks = [];
    this.flashes.clear();
    if (this.frame && this.grid) this.#draw(null);
  }

  /** How many blocks of each state are shown. */
  counts() {
    const counts = STATES.map(() => 0);
    for (const cell of this.frame?.cells ?? []) counts[cell & STATE_BITS] += 1;
    return counts;
  }

  // --- who owns what

  #own() {
    const { blocks, running, block_size: size } = this.frame;
    this.owner = new Int32Array(blocks).fill(-1);
    this.second = new Map();
    this.level = new Map();
    running.forEach((row, index) => {
      for (const { first, blocks: own } of row.tables) {
        for (const block of own) {
          if (this.owner[block] < 0) this.owner[block] = index;
          else if (!this.second.has(block)) this.second.set(block, index);
        }
        const newest = Math.floor(row.computed / size) - first;
        if (row.computed % size && newest < own.length) {
          this.level.set(own[newest], (row.computed % size) / size);
        }
      }
    });
  }

  /** Every owner of a block, with its place: `{id, kind, group, index}`. */
  owners(block) {
    const found = [];
    for (const owner of [...this.frame.running, ...this.frame.holds]) {
      owner.tables.forEach(({ first, blocks }, group) => {
        const index = blocks.indexOf(block);
        if (index >= 0) found.push({ id: owner.id, kind: owner.kind, group, index: first + index });
      });
    }
    return found;
  }

  // --- drawing

  #draw(before) {
    const { grid, frame, looks } = this;
    const now = performance.now();
    for (let cell = 0; cell < grid.cells; cell += 1) {
      const look = grid.per === 1 ? this.#look(cell) : this.#blend(cell);
      const key = `${look.fill}${look.second ?? ""}${look.level ?? ""}${+!!look.dim}${+!!look.pinned}${+!!look.moving}`;
      if (looks[cell]?.key === key) continue;
      looks[cell] = { ...look, key };
      drawCell(this.context, grid, cell, look, this.colours);
      const changed = before && grid.per === 1 && before[cell] !== frame.cells[cell];
      if (changed && this.flashes.size < MOST_FLASHES && !calm.matches) this.flashes.set(cell, now);
    }
    if (this.cursor >= 0) this.#mark(this.cursor);
    if (this.flashes.size && !this.flashing) {
      this.flashing = requestAnimationFrame(() => this.#flash());
    }
  }

  /** How a cell of one block looks. */
  #look(block) {
    const code = this.frame.cells[block];
    const state = code & STATE_BITS;
    const own = this.owner[block];
    const look = {
      fill: this.colours.states[state],
      pinned: (code & PINNED) !== 0,
      moving: (code & MOVING) !== 0,
      level: this.level.get(block),
      dim: this.#isDim(state, block),
    };
    if (this.byRequest && own >= 0) {
      const { running } = this.frame;
      look.fill = colourOf(running[own].id, this.colours.dark);
      const second = this.second.get(block);
      if (second !== undefined) look.second = colourOf(running[second].id, this.colours.dark);
    }
    return look;
  }

  #isDim(state, block) {
    if (this.only !== null) return state !== this.only;
    if (this.request === null) return false;
    if (!this.ownBlocks || this.ownBlocks.frame !== this.frame || this.ownBlocks.id !== this.request) {
      this.ownBlocks = { frame: this.frame, id: this.request, blocks: blocksOf(this.frame, this.request) };
    }
    return !this.ownBlocks.blocks.has(block);
  }

  /** How a cell of many blocks looks: the mean of their colours. */
  #blend(cell) {
    const { per } = this.grid;
    const times = new Map();
    const stop = Math.min((cell + 1) * per, this.frame.blocks);
    for (let block = cell * per; block < stop; block += 1) {
      const state = this.frame.cells[block] & STATE_BITS;
      const seen = this.only !== null || this.request !== null ? (this.#isDim(state, block) ? FREE : state) : state;
      times.set(seen, (times.get(seen) ?? 0) + 1);
    }
    return { fill: mixed([...times].map(([state, n]) => [this.mixes[state], n])) };
  }

  #flash() {
    const now = performance.now();
    for (const [cell, since] of this.flashes) {
      const left = 1 - (now - since) / FLASH_MS;
      drawCell(this.context, this.grid, cell, this.looks[cell], this.colours);
      if (left <= 0) {
        this.flashes.delete(cell);
        continue;
      }
      const [x, y] = placeOf(this.grid, cell);
      this.context.globalAlpha = 0.55 * left;
      this.context.fillStyle = this.colours.ink;
      this.context.fillRect(x, y, this.grid.size, this.grid.size);
      this.context.globalAlpha = 1;
    }
    if (this.cursor >= 0) this.#mark(this.cursor);
    this.flashing = this.flashes.size ? requestAnimationFrame(() => this.#flash()) : null;
  }

  #mark(cell) {
    const [x, y] = placeOf(this.grid, cell);
    this.context.strokeStyle = this.colours.ink;
    this.context.lineWidth = this.grid.size >= 5 ? 1.5 : 1;
    this.context.strokeRect(x + 0.75, y + 0.75, this.grid.size - 1.5, this.grid.size - 1.5);
  }

  // --- legend

  #legend() {
    this.numbers = STATES.map(() => h("b"));
    const pressed = (state) => () => {
      this.only = this.only === state ? null : state;
      buttons.forEach((one, n) => one.setAttribute("aria-pressed", String(n === this.only)));
      this.redraw();
    };
    const buttons = STATES.map((name, state) =>
      h("button", { type: "button", title: MEANING[state], "aria-pressed": "false", onclick: pressed(state) },
        h("i", { class: `swatch ${name}` }), `${name} `, this.numbers[state]));
    this.pinned = h("b");
    at("legend").append(
      ...buttons.map((one) => h("li", {}, one)),
      h("li", { class: "quiet", title: "a request asked that the beginning of its prompt stays" },
        h("i", { class: "swatch pinned" }), "pinned ", this.pinned),
    );
  }

  #count() {
    const counts = this.counts();
    counts.forEach((blocks, state) => write(this.numbers[state], whole(blocks)));
    write(this.pinned, whole(this.frame.counts.pinned));
    this.canvas.dataset.counts = JSON.stringify(Object.fromEntries(STATES.map((name, n) => [name, counts[n]])));
    this.canvas.dataset.engine = JSON.stringify(this.frame.counts);
    this.canvas.dataset.number = this.frame.number;
  }

  // --- pointer and keys

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => {
      if (!this.grid) return;
      const box = canvas.getBoundingClientRect();
      this.spoken = false;
      this.#point(cellAt(this.grid, event.clientX - box.left, event.clientY - box.top));
    });
    canvas.addEventListener("pointerleave", () => this.#point(-1));
    canvas.addEventListener("blur", () => this.#point(-1));
    canvas.addEventListener("click", () => this.#open());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.fit()).observe(canvas.parentElement);
    for (const radio of document.getElementsByName("colour")) {
      radio.addEventListener("change", () => {
        this.byRequest = radio.value === "request";
        this.redraw();
      });
    }
  }

  #key(event) {
    if (!this.grid) return;
    const { cells, columns } = this.grid;
    const moves = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns,
      PageUp: -10 * columns, PageDown: 10 * columns, Home: -cells, End: cells,
    };
    if (event.key === "Enter") this.#open();
    else if (event.key in moves) {
      const from = this.cursor < 0 ? 0 : this.cursor + moves[event.key];
      this.spoken = true;
      this.#point(Math.max(0, Math.min(cells - 1, from)));
    } else return;
    event.preventDefault();
  }

  /** Show the request that owns the block under the cursor, the next one of them each time. */
  #open() {
    if (this.cursor < 0 || this.grid.per > 1) return;
    const ids = this.owners(this.cursor).filter((owner) => !owner.kind).map((owner) => owner.id);
    if (ids.length) this.onOwner(ids[(ids.indexOf(this.request) + 1) % ids.length]);
  }

  #point(cell) {
    if (cell === this.cursor || !this.grid) return;
    const before = this.cursor;
    this.cursor = cell;
    if (before >= 0 && this.looks[before]) drawCell(this.context, this.grid, before, this.looks[before], this.colours);
    if (cell < 0) {
      this.tip.hidden = true;
      return;
    }
    this.#mark(cell);
    this.#say(cell);
  }

  #say(cell) {
    this.tip.replaceChildren(...(this.grid.per > 1 ? this.#saidOfMany(cell) : this.#saidOfOne(cell)));
    this.tip.hidden = false;
    if (this.spoken) write(at("pool-said"), spoken(this.tip));
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = placeOf(this.grid, cell);
    const left = Math.min(box.left + x + this.grid.pitch + 10, innerWidth - this.tip.offsetWidth - 8);
    const below = box.top + y + this.grid.pitch + 10;
    const fits = below + this.tip.offsetHeight < innerHeight;
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${fits ? below : Math.max(8, box.top + y - this.tip.offsetHeight - 10)}px`;
  }

  #saidOfMany(cell) {
    const start = cell * this.grid.per;
    const stop = Math.min(start + this.grid.per, this.frame.blocks);
    const counts = STATES.map(() => 0);
    for (let block = start; block < stop; block += 1) counts[this.frame.cells[block] & STATE_BITS] += 1;
    const parts = counts.map((n, state) => n && h("p", { class: "owner" }, h("i", { class: `swatch ${STATES[state]}` }), `${whole(n)} ${STATES[state]}`));
    return [h("h3", {}, `Blocks ${whole(start)}–${whole(stop - 1)}`), ...parts.filter(Boolean)];
  }

  #saidOfOne(block) {
    const code = this.frame.cells[block];
    const state = code & STATE_BITS;
    const owners = this.owners(block);
    const size = this.frame.block_size;
    const groups = this.frame.windows.length > 1;
    const lines = owners.slice(0, 6).map(({ id, kind, group, index }) =>
      h("p", { class: "owner" }, swatch(id, kind, this.colours.dark), kind ? `${kind} ` : "", h("code", {}, id),
        h("span", { class: "quiet" }, ` ${whole(index * size)}–${whole((index + 1) * size - 1)}${groups ? `, group ${group}` : ""}`)));
    const more = owners.length - lines.length;
    const marks = `${code & PINNED ? ", pinned" : ""}${code & MOVING ? ", being moved" : ""}`;
    return [
      h("h3", {}, h("i", { class: `swatch ${STATES[state]}` }), `Block ${whole(block)}: ${STATES[state]}${marks}`),
      ...lines,
      more > 0 && h("p", { class: "quiet" }, `and ${whole(more)} more`),
      ...this.#asked(block),
    ].filter(Boolean);
  }

  /** What the server says of a block besides, once it has been asked. */
  #asked(block) {
    const now = performance.now();
    if (this.asked.block !== block) this.asked = { block, at: 0, told: null };
    if (now - this.asked.at > 1000) {
      this.asked.at = now;
      setTimeout(() => this.#ask(block), this.asked.told ? 0 : ASK_AFTER_MS);
    }
    const { told } = this.asked;
    if (!told) return [h("p", { class: "quiet" }, "…")];
    const said = [];
    if (told.key) said.push(h("p", {}, "key ", h("code", {}, told.key), h("span", { class: "quiet" }, ` ends ${whole(told.prefix_tokens)} tokens`)));
    if (told.given_ago_s !== null) said.push(h("p", { class: "quiet" }, `given out ${seconds(told.given_ago_s)} ago, ${count(told.epoch, "time")} in all`));
    if (told.evicted_after !== null) said.push(h("p", { class: "quiet" }, told.evicted_after ? `evicted after ${whole(told.evicted_after)} others` : "evicted first"));
    return said.length ? said : [h("p", { class: "quiet" }, "never used")];
  }

  async #ask(block) {
    if (this.cursor !== block) return;
    try {
      const told = await get(`/debug/pool/blocks/${block}`, { quiet: true });
      if (this.asked.block !== block) return;
      this.asked.told = told;
      if (this.cursor === block) this.#say(block);
    } catch {
      // The next picture asks again; what is known without it stands there.
    }
  }
}

/** What is read out of a tip: not what changes all the time. */
const spoken = (tip) => [...tip.querySelectorAll("h3, .owner")].map((part) => part.textContent).join(", ");

/** The blocks of a request. */
export function blocksOf(frame, id) {
  const rows = frame.running.filter((row) => row.id === id);
  return new Set(rows.flatMap((row) => row.tables.flatMap(({ blocks }) => [...blocks])));
}

/** A spot in the colour of a request. */
export function swatch(id, kind, dark) {
  const spot = h("i", { class: `swatch ${kind ? "held" : ""}` });
  if (!kind) spot.style.background = colourOf(id, dark);
  return spot;
}
