/** Elements, and numbers in words. */

const SVG = "http://www.w3.org/2000/svg";

/** The element of this id. */
export const at = (id) => document.getElementById(id);

/** A new element. Properties that begin with "on" are listeners, the others attributes; null and
 * false leave one out. Children are nodes or text. */
export function h(tag, properties = {}, ...children) {
  return made(document.createElement(tag), properties, children);
}

/** The same in SVG. */
export function svg(tag, properties = {}, ...children) {
  return made(document.createElementNS(SVG, tag), properties, children);
}

function made(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Write `text` into an element, only if it is another one than before. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const WHOLE = new Intl.NumberFormat("en");

/** 12,345 */
export const whole = (number) => WHOLE.format(Math.round(number));

/** 1 block, 2 blocks */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** 12 % */
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

/** 12 ms, 3.4 s, 5 min 6 s, 2 h 3 min */
export function seconds(value) {
  if (value < 0.9995) return `${Math.max(0, Math.round(1000 * value))} ms`;
  if (value < 60) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

/** 135 M */
export function short(number) {
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return `${(number / size).toFixed(number < 10 * size ? 1 : 0)} ${unit}`;
  }
  return whole(number);
}
