/** An answer as elements: fenced code, `code`, **bold**; all else as it stands. Never as HTML. */

import { h } from "./dom.js";

/** The nodes of an answer. */
export function nodesOf(text) {
  return text.split(/^```/m).map((part, n) => (n % 2 ? fenced(part) : h("p", {}, inline(trimmed(part, n))))).filter((node) => node.textContent);
}

function fenced(part) {
  const line = part.indexOf("\n");
  return h("pre", {}, h("code", {}, line < 0 ? part : part.slice(line + 1)));
}

const trimmed = (part, n) => (n ? part.replace(/^\n+/, "") : part).replace(/\n+$/, (tail) => (n ? "" : tail.slice(0, 1)));

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (/^`[^`]+`$/.test(part)) return h("code", {}, part.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(part)) return h("strong", {}, part.slice(2, -2));
    return part;
  });
}
