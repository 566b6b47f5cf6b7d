/** Pictures of the pool as they come from the server.
 *
 *   ┌────────┬──────────────────┬──────────────┬───────┐
 *   │ uint32 │ head, JSON       │ tables       │ cells │     see octavo/serve/frame.py
 *   │ length │ padded to 4      │ int32        │ uint8 │
 *   └────────┴──────────────────┴──────────────┴───────┘
 */

import { call, Refusal } from "./api.js";

export const STATES = ["free", "cached", "owned", "shared", "held", "fenced"];
export const STATE_BITS = 7;
export const PINNED = 8;
export const MOVING = 16;

const RETRY_MS = 1500;
const DRAINING_MS = 1000; // a server that drains lets nobody wait for the next picture

/** The head, with `tables` of each owner as `{first, blocks}`, and `cells`. */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let place = 4 + length;
  for (const owner of [...head.running, ...head.holds]) {
    owner.tables = owner.tables.map(([first, size]) => {
      const blocks = new Int32Array(buffer, place, size);
      place += 4 * size;
      return { first, blocks };
    });
  }
  head.cells = new Uint8Array(buffer, place, head.blocks);
  return head;
}

/** Tell `onFrame` of each picture while the page is seen; `onRefused` when there is none to have.
 * Returns a function that tries again at once. */
export function watch(onFrame, onRefused) {
  let number = 0;
  let wake = () => {};
  const rest = (ms) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, ms); });

  async function next() {
    const response = await call(`/debug/pool/frame?after=${number}`, { quiet: true });
    const frame = decode(await response.arrayBuffer());
    if (frame.number === number) await rest(DRAINING_MS);
    number = frame.number;
    return frame;
  }

  async function forever() {
    for (;;) {
      if (document.hidden) await seen();
      let frame;
      try {
        frame = await next();
      } catch (error) {
        number = 0;
        onRefused(error);
        await rest(error instanceof Refusal && error.status < 500 ? 20 * RETRY_MS : RETRY_MS);
        continue;
      }
      try {
        onFrame(frame);
      } catch (error) {
        reportError(error); // the next picture may be drawn all the same
      }
    }
  }

  forever();
  return () => wake();
}

function seen() {
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
}
