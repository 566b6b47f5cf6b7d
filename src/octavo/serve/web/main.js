/** The page: a chat, and the engine beside it. */

import { askForKey, get, onKeyWanted, Refusal } from "./api.js";
import { Chat } from "./chat.js";
import { Detail } from "./detail.js";
import { at, short, write } from "./dom.js";
import { watch } from "./frames.js";
import { Health } from "./health.js";
import { PoolView } from "./pool.js";
import { Requests } from "./requests.js";

const THEMES = ["auto", "light", "dark"];

function start(about) {
  const parts = about.parameters ? `${short(about.parameters)}, ` : "";
  write(at("about"), `${about.model} · ${parts}Octavo ${about.version}`);
  document.title = `Octavo · ${about.model}`;

  const choose = (id) => {
    requests.choose(id);
    pool.choose(id);
    if (id !== null) detail.open(id);
  };
  const pool = new PoolView(choose);
  const requests = new Requests(choose);
  const detail = new Detail(choose, () => choose(null));
  const health = new Health();
  new Chat(about, choose);

  const again = watch((frame) => {
    at("locked").hidden = true;
    document.body.dataset.pool = "seen";
    pool.show(frame);
    requests.show(frame);
    detail.show(frame);
  }, (error) => {
    const locked = error instanceof Refusal && (error.status === 401 || error.status === 403);
    at("locked").hidden = !locked;
    if (locked) document.body.dataset.pool = "locked";
  });
  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", async () => { if (await askForKey()) again(); });
  }
  health.follow();

  const redraw = () => { pool.fit(); health.redraw(); };
  theme(redraw);
  views(redraw);
}

/** Light or dark as the system has it, or as chosen here. */
function theme(changed) {
  const use = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    write(at("theme-name"), name);
    changed();
  };
  let chosen = localStorage.getItem("octavo-theme") ?? "auto";
  at("theme").addEventListener("click", () => {
    chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
    localStorage.setItem("octavo-theme", chosen);
    use(chosen);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  use(chosen);
}

/** On a narrow page one of the two at a time. */
function views(changed) {
  const tabs = ["chat", "engine"];
  for (const tab of tabs) {
    at(`tab-${tab}`).addEventListener("click", () => {
      document.body.dataset.view = tab;
      for (const other of tabs) at(`tab-${other}`).setAttribute("aria-pressed", String(other === tab));
      changed();
    });
  }
}

onKeyWanted(() => new Promise((resolve) => {
  const dialog = at("key");
  at("key-text").value = "";
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    resolve(dialog.returnValue === "use" ? at("key-text").value.trim() : "");
  }, { once: true });
  dialog.showModal();
}));

start(await get("/web/about.json"));
