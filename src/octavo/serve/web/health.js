/** The four numbers that say how a paged cache fares, over the last minutes, and the server's state. */

import { get, Refusal } from "./api.js";
import { Chart } from "./charts.js";
import { at, percent, whole, write } from "./dom.js";

const SPAN_S = 600;
const MS = 2000;

const NUMBERS = [
  {
    title: "Utilisation", field: "utilisation", most: 1, said: percent,
    help: "The share of the pool that running requests own",
  },
  {
    title: "Preemptions", field: "preemptions_a_minute", said: (n) => `${n < 10 ? +n.toFixed(1) : whole(n)} /min`,
    help: "How often a running request gave up its blocks, a minute: above 0 for long, the pool is too small or too many run",
  },
  {
    title: "Table depth", field: "table_depth", said: (n) => `${n < 10 ? +n.toFixed(1) : whole(n)} blocks`,
    help: "Blocks in the table of a running request, on average",
  },
  {
    title: "Cache hits", field: "hit_ratio", most: 1, said: percent,
    help: "The share of the tokens looked up in the prefix cache that were there",
  },
];

export class Health {
  constructor() {
    this.points = [];
    this.charts = [];
    this.state = null;
  }

  /** Ask for new points for as long as the page is there. */
  async follow() {
    for (;;) {
      if (!document.hidden) await this.#ask();
      await new Promise((resolve) => setTimeout(resolve, MS));
    }
  }

  async #ask() {
    const after = this.points.at(-1)?.[0] ?? 0;
    try {
      const told = await get(`/debug/history?after=${after}`, { quiet: true });
      if (!this.charts.length) this.#draw(told.fields);
      this.#status(told.status);
      this.points.push(...told.points);
      const last = this.points.at(-1)?.[0] ?? 0;
      this.points = this.points.filter(([at]) => at > last - SPAN_S);
      for (const chart of this.charts) chart.show(this.points);
    } catch (error) {
      await this.#unseen(error);
    }
  }

  /** Without the right to the numbers there is still the state. */
  async #unseen(error) {
    if (!(error instanceof Refusal)) return this.#status("unreachable");
    try {
      this.#status((await get("/health", { quiet: true })).status);
    } catch (other) {
      this.#status(other instanceof Refusal ? "not ready" : "unreachable");
    }
  }

  #status(status) {
    const element = at("status");
    element.dataset.status = status;
    write(element, status === "ok" ? "ready" : status);
  }

  #draw(fields) {
    this.charts = NUMBERS.map(({ field, ...other }) => {
      const place = fields.indexOf(field);
      return new Chart({ ...other, value: (point) => point[place], spanS: SPAN_S });
    });
    at("health").append(...this.charts.map((chart) => chart.element));
    for (const chart of this.charts) {
      chart.canvas.addEventListener("pointermove", (event) => this.#look(chart.timeAt(event.clientX)));
      chart.canvas.addEventListener("pointerleave", () => this.#look(null));
    }
  }

  #look(atS) {
    for (const chart of this.charts) chart.look(atS);
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
  }
}
