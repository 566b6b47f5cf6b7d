/** Colours of states and of requests, in light and dark. */

import { STATES } from "./frames.js";

/** The colours of the style sheet as they hold now. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    states: STATES.map((state) => of(state)),
    ink: of("ink"),
    paper: of("panel"),
    line: of("line"),
    mark: of("mark"),
    dark: of("scheme") === "dark",
  };
}

const hues = new Map();

/** A hue for each request, far from those of its neighbours. Branches are near their request. */
function hueOf(id) {
  const [request, branch = "0"] = id.split("#");
  if (!hues.has(request)) hues.set(request, (hues.size * 137.508 + 205) % 360);
  if (hues.size > 4096) hues.delete(hues.keys().next().value);
  return (hues.get(request) + 9 * Number(branch)) % 360;
}

/** The colour of a request. */
export function colourOf(id, dark) {
  return dark ? `hsl(${hueOf(id)} 52% 60%)` : `hsl(${hueOf(id)} 55% 46%)`;
}
