// What a text cost and what it is worth: evaluations, time, entropy, and a judge's perplexity.

import { json, Problem } from "/page/api.js";
import { el, short } from "/page/dom.js";

export class Figures {
  constructor() {
    this.values = {};
    this.reading = null;
    const one = (name, words) => {
      this.values[name] = el("dd", {}, "–");
      return el("div", {}, el("dt", {}, words), this.values[name]);
    };
    this.note = el("p", { class: "note" });
    this.root = el("div", { class: "figures", hidden: true },
      el("dl", {}, one("evaluations", "evaluations"), one("ms", "milliseconds"), one("speed", "tokens/s"), one("entropy", "entropy"), one("perplexity", "perplexity")),
      this.note);
  }

  clear() {
    this.root.hidden = true;
    this.note.textContent = "";
    for (const value of Object.values(this.values)) value.textContent = "–";
  }

  show(frame) {
    this.root.hidden = false;
    const written = frame.ids.filter((_, i) => frame.revealed_at[i] >= 0 && frame.pieces[i]).length;
    this.values.evaluations.textContent = frame.evaluations;
    this.values.ms.textContent = short(1000 * frame.seconds);
    this.values.speed.textContent = short(written / frame.seconds);
    this.values.entropy.textContent = frame.entropy.toFixed(2);
  }

  // What there is so far, masks left out; while the judge still reads an earlier frame, this one is passed over
  soFar(model, frame, signal) {
    this.reading ??= this.#read(model, frame, " …", signal).catch(() => {}).finally(() => { this.reading = null; });
  }

  // A judge that fails concerns this figure alone: the text is written
  async judge(model, frame, signal) {
    await this.reading;
    try {
      await this.#read(model, frame, "", signal);
    } catch (error) {
      this.values.perplexity.textContent = "–";
      if (!(error instanceof Problem)) throw error;
      this.note.textContent = error.message;
    }
  }

  // The judge reads what was written after what was given at the beginning
  async #read(model, frame, more, signal) {
    if (this.values.perplexity.textContent === "–") this.values.perplexity.textContent = "…";
    const first = frame.ids.findIndex((id, i) => id === null || frame.revealed_at[i] >= 0);
    const row = frame.ids.filter((id) => id !== null);
    const score = await json("/play/judge", { model, row, given: Math.max(0, first) }, signal);
    this.values.perplexity.textContent = short(score.perplexity) + more;
    this.note.textContent = `Entropy of the tokens, in nats; perplexity by ${score.judge}.`;
  }
}
