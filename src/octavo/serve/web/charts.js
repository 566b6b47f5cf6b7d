/** Small charts over time: a line each, drawn on a canvas, one cursor over all of them. */

import { palette } from "./colours.js";
import { h, write } from "./dom.js";

const HEIGHT = 54;
const PAD = 4;
const LEAST_S = 120;

export class Chart {
  /** `value(point)` is a number or null; `said(number)` writes it; the range goes from 0 to `most`,
   * or to the largest value if that is null. */
  constructor({ title, help, value, said, most = null, spanS }) {
    Object.assign(this, { value, said, most, spanS });
    this.canvas = h("canvas", { role: "img" });
    this.number = h("b", {}, "–");
    this.when = h("span", { class: "quiet" });
    this.element = h("figure", { class: "chart", title: help },
      h("figcaption", {}, h("span", { class: "title" }, title), this.number, this.when), this.canvas);
    this.title = title;
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(points) {
    this.points = points;
    const newest = points.findLast((point) => this.value(point) !== null);
    this.newest = newest ? this.said(this.value(newest)) : "–";
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.newest} now`);
    this.draw();
  }

  /** Look at a time, or at now for null. */
  look(atS) {
    this.at = atS;
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(HEIGHT * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    const colours = palette();
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, HEIGHT - 0.5);
    context.lineTo(width, HEIGHT - 0.5);
    context.stroke();
    this.#line(context, colours, width);
    this.#cursor(context, colours, width);
  }

  /** From when to when: all that is there, but not less than two minutes or more than the span. */
  #times() {
    const last = this.points.at(-1)?.[0] ?? 0;
    const spanS = Math.min(this.spanS, Math.max(LEAST_S, last - (this.points[0]?.[0] ?? 0)));
    return { first: last - spanS, spanS };
  }

  #scale(width) {
    const { first, spanS } = this.#times();
    const top = this.most ?? Math.max(1, ...this.points.map((point) => this.value(point) ?? 0));
    return {
      x: (atS) => ((atS - first) / spanS) * (width - 3),
      y: (value) => HEIGHT - 1 - (Math.min(value, top) / top) * (HEIGHT - 1 - PAD),
    };
  }

  #line(context, colours, width) {
    const { x, y } = this.#scale(width);
    context.strokeStyle = colours.mark;
    context.fillStyle = colours.mark;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    for (const run of this.#runs()) {
      context.beginPath();
      run.forEach((point, n) => context[n ? "lineTo" : "moveTo"](x(point[0]), y(this.value(point))));
      context.stroke();
      context.lineTo(x(run.at(-1)[0]), HEIGHT - 1);
      context.lineTo(x(run[0][0]), HEIGHT - 1);
      context.globalAlpha = 0.12;
      context.fill();
      context.globalAlpha = 1;
      if (run.length === 1) context.fillRect(x(run[0][0]) - 1, y(this.value(run[0])) - 1, 2, 2);
    }
  }

  /** The points between gaps. */
  #runs() {
    const runs = [[]];
    let before = null;
    for (const point of this.points) {
      if (this.value(point) === null || (before !== null && point[0] - before > 10)) runs.push([]);
      if (this.value(point) !== null) runs.at(-1).push(point);
      before = point[0];
    }
    return runs.filter((run) => run.length);
  }

  #cursor(context, colours, width) {
    const point = this.at && nearest(this.points, this.at);
    const value = point ? this.value(point) : null;
    write(this.number, point ? (value === null ? "–" : this.said(value)) : (this.newest ?? "–"));
    write(this.when, point ? new Date(1000 * point[0]).toLocaleTimeString() : "");
    if (!point) return;
    const { x, y } = this.#scale(width);
    context.strokeStyle = colours.ink;
    context.globalAlpha = 0.4;
    context.beginPath();
    context.moveTo(x(point[0]), 0);
    context.lineTo(x(point[0]), HEIGHT);
    context.stroke();
    context.globalAlpha = 1;
    if (value === null) return;
    context.fillStyle = colours.ink;
    context.beginPath();
    context.arc(x(point[0]), y(value), 2.5, 0, 2 * Math.PI);
    context.fill();
  }

  /** The time under a pointer, in seconds since 1970. */
  timeAt(clientX) {
    const box = this.canvas.getBoundingClientRect();
    const { first, spanS } = this.#times();
    return first + ((clientX - box.left) / box.width) * spanS;
  }
}

function nearest(points, atS) {
  let best = null;
  for (const point of points) {
    if (best === null || Math.abs(point[0] - atS) < Math.abs(best[0] - atS)) best = point;
  }
  return best;
}
