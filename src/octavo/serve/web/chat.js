/** A place to try the model: a conversation, streamed, with all it is asked under the hand. */

import { call, events, Refusal } from "./api.js";
import { at, count, h, seconds, write } from "./dom.js";
import { nodesOf } from "./text.js";

const PARAMETERS = [
  { name: "temperature", title: "Temperature", min: 0, max: 5, step: 0.05, help: "0 takes the likeliest token" },
  { name: "top_p", title: "Top p", min: 0.01, max: 1, step: 0.01, help: "draw from the likeliest tokens that have this share" },
  { name: "top_k", title: "Top k", min: 0, max: 100000, step: 1, help: "draw from so many likeliest tokens; 0 is all" },
  { name: "min_p", title: "Min p", min: 0, max: 1, step: 0.01, help: "leave out tokens below this share of the likeliest" },
  { name: "max_tokens", title: "Max tokens", min: 1, step: 1, help: "the longest answer" },
  { name: "seed", title: "Seed", step: 1, help: "the same seed gives the same answer" },
  { name: "repetition_penalty", title: "Repetition penalty", min: 0.01, max: 10, step: 0.01, help: "above 1: less of what was said" },
  { name: "n", title: "Answers", min: 1, max: 16, step: 1, help: "so many answers to one prompt, which is computed once" },
  { name: "stop", title: "Stop at", text: true, help: "the answer ends before this text" },
  { name: "priority", title: "Priority", step: 1, help: "lower goes first" },
];

export class Chat {
  /** `onChosen` is told the id of an answer. */
  constructor(about, onChosen) {
    this.about = about;
    this.onChosen = onChosen;
    this.turns = [];
    this.stopping = null;
    this.inputs = {};
    this.#build();
  }

  #build() {
    for (const { name, title, help, text, ...range } of PARAMETERS) {
      const input = h("input", { id: `parameter-${name}`, type: text ? "text" : "number", inputmode: text ? "text" : "decimal", placeholder: "default", ...range });
      this.inputs[name] = input;
      at("parameters").append(h("label", { title: help }, h("span", {}, title), input));
    }
    this.inputs.temperature.value = "0.7";
    this.inputs.max_tokens.value = String(Math.min(512, Math.floor(this.about.max_model_len / 2)));
    at("system-part").hidden = !this.about.chat;
    const message = at("message");
    message.placeholder = this.about.chat ? "Ask something" : "Write a beginning; the model goes on";
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    at("stop").addEventListener("click", () => this.stopping?.abort());
    at("clear").addEventListener("click", () => this.#clear());
    this.#welcome();
  }

  #welcome() {
    const words = this.about.chat
      ? "Ask the model something, and watch the pool beside: blocks are taken as the answer grows, and stay cached for prompts that begin alike."
      : "This model has no chat template: it continues what you write.";
    at("messages").replaceChildren(h("p", { class: "welcome quiet" }, words));
  }

  #clear() {
    this.stopping?.abort();
    this.turns = [];
    write(at("speed"), "");
    this.#welcome();
    at("message").focus();
  }

  async #send() {
    const text = at("message").value;
    if (!text.trim() || this.stopping) return;
    at("message").value = "";
    if (!this.turns.length) at("messages").replaceChildren();
    this.turns.push({ role: "user", content: text });
    at("messages").append(h("article", { class: "turn user" }, h("h3", { class: "unseen" }, "You"), h("p", {}, text)));
    const answer = new Answer(this.onChosen);
    at("messages").append(answer.element);
    this.#follow(true);
    this.stopping = new AbortController();
    this.#busy(true);
    try {
      await this.#stream(text, answer, this.stopping.signal);
      answer.end();
    } catch (error) {
      answer.fail(this.stopping.signal.aborted ? null : error);
    }
    this.turns.push({ role: "assistant", content: answer.texts[0] ?? "" });
    this.stopping = null;
    this.#busy(false);
    write(at("speed"), "");
    at("message").focus({ preventScroll: true });
  }

  async #stream(text, answer, signal) {
    const path = this.about.chat ? "/v1/chat/completions" : "/v1/completions";
    const body = { ...this.#asked(), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    if (this.about.chat) body.messages = this.#messages();
    else body.prompt = text;
    const response = await call(path, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(500, chunk.error.message);
      answer.take(chunk);
      write(at("speed"), answer.speed());
      this.#follow();
    }
  }

  #messages() {
    const system = at("system").value.trim();
    return [...(system ? [{ role: "system", content: system }] : []), ...this.turns];
  }

  /** The parameters that are given; the server decides the others. */
  #asked() {
    const asked = {};
    for (const { name, text } of PARAMETERS) {
      const { value } = this.inputs[name];
      if (value !== "") asked[name] = text ? value : Number(value);
    }
    return asked;
  }

  #busy(busy) {
    at("send").hidden = busy;
    at("stop").hidden = !busy;
    at("messages").setAttribute("aria-busy", String(busy));
    if (busy) at("stop").focus({ preventScroll: true });
  }

  /** Keep the end in sight, unless who reads has gone back. */
  #follow(always = false) {
    const list = at("messages");
    if (always || list.scrollHeight - list.scrollTop - list.clientHeight < 80) list.scrollTop = list.scrollHeight;
  }
}

/** What comes of one message: one answer, or several side by side. */
class Answer {
  constructor(onChosen) {
    this.onChosen = onChosen;
    this.texts = [];
    this.parts = [];
    this.sent = performance.now();
    this.first = null;
    this.tokens = 0;
    this.cost = null;
    this.reasons = [];
    this.facts = h("p", { class: "facts quiet" }, "waiting for the first token");
    this.element = h("article", { class: "turn answer" }, h("h3", { class: "unseen" }, "Model"), this.facts);
  }

  take(chunk) {
    this.id ??= chunk.id;
    this.last = performance.now();
    for (const choice of chunk.choices) {
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (piece) this.#add(choice.index, piece);
      if (choice.finish_reason) this.reasons[choice.index] = choice.finish_reason;
    }
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    if (this.tokens) this.first ??= this.last;
    if (chunk.octavo) this.cost = { ...chunk.octavo, prompt: chunk.usage.prompt_tokens };
  }

  #add(index, piece) {
    this.texts[index] = (this.texts[index] ?? "") + piece;
    if (!this.parts[index]) {
      this.parts[index] = h("div", { class: "text", "data-answer": index + 1 });
      this.facts.before(...this.parts.filter(Boolean));
    }
    this.parts[index].replaceChildren(...nodesOf(this.texts[index]));
  }

  /** Tokens, and how many a second. */
  speed() {
    if (!this.tokens) return "";
    const took = (this.last - this.first) / 1000;
    const rate = took > 0.2 ? `, ${((this.tokens - 1) / took).toFixed(1)} tokens/s` : "";
    return `${count(this.tokens, "token")}${rate}`;
  }

  end() {
    this.#close([this.reasons.includes("length") && "cut off at its longest"]);
  }

  /** It ended early: by `error`, or because it was stopped. */
  fail(error) {
    if (error) this.element.append(h("p", { class: "bad", role: "alert" }, error.message));
    this.#close([error ? null : "stopped"]);
  }

  #close(more) {
    const { cost } = this;
    const said = [
      this.speed(),
      this.first !== null && `first after ${seconds((this.first - this.sent) / 1000)}`,
      cost && `prompt ${count(cost.prompt, "token")}${cost.cached_tokens ? `, ${cost.cached_tokens} cached` : ""}`,
      cost?.preemptions ? `preempted ${count(cost.preemptions, "time")}` : null,
      ...more,
    ].filter(Boolean);
    const id = this.id?.replace(/^(chatcmpl|cmpl)-/, "");
    this.facts.replaceChildren(said.join(" · "), id ? " " : "", id ? h("button", { type: "button", class: "link", onclick: () => this.onChosen(id) }, "its life") : "");
  }
}
