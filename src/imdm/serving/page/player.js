// Texts that appear step by step, in step with one another; a scrubber that replays them.

import { calm, el } from "/page/dom.js";

export class Player {
  constructor(views, { wide = false } = {}) {
    this.views = views;
    this.button = el("button", { type: "button", class: "plain", onclick: () => this.toggle() }, "Play");
    this.range = el("input", { type: "range", min: "0", max: "1", value: "0", "aria-label": "Show the text after this step" });
    this.output = el("output");
    this.range.addEventListener("input", () => { this.playing = false; this.to(Number(this.range.value)); });
    this.root = el("div", { class: wide ? "player wide" : "player", hidden: true }, this.button, this.range, this.output);
    this.timer = 0;
  }

  start(steps) {
    clearTimeout(this.timer);
    this.steps = steps;
    this.frames = this.views.map(() => null);
    this.after = 0;
    this.playing = true;
    this.range.max = steps;
    this.root.hidden = false;
    this.pause = calm() ? 0 : Math.max(60, Math.min(420, 2400 / steps));
    this.#label();
  }

  // A frame of one of the texts has come
  push(number, frame) {
    this.frames[number] = frame;
    if (this.playing && this.pause === 0) this.to(this.#ready());
    else if (this.playing && this.after === 0) this.#tick();
    else this.#draw();
  }

  get done() {
    return this.frames.every((frame) => frame?.done);
  }

  to(after) {
    this.after = after;
    this.#draw();
    this.#label();
  }

  toggle() {
    if (this.playing && this.after < this.steps) {
      this.playing = false;
    } else {
      this.playing = true;
      if (this.after >= this.steps) this.to(0);
      this.pause ||= 420; // asked for
      this.#tick();
    }
    this.#label();
  }

  stop() {
    clearTimeout(this.timer);
    this.playing = false;
    if (!this.frames?.some(Boolean)) this.root.hidden = true; // nothing has come
    else this.#label();
  }

  #ready() {
    return Math.min(...this.frames.map((frame) => (frame === null ? 0 : frame.done ? this.steps : frame.step)));
  }

  #tick() {
    clearTimeout(this.timer);
    if (!this.playing) return;
    if (this.after < this.#ready()) this.to(this.after + 1);
    if (this.after < this.steps) this.timer = setTimeout(() => this.#tick(), this.pause);
    else this.playing = false;
    this.#label();
  }

  #draw() {
    this.views.forEach((view, i) => this.frames[i] && view.show(this.frames[i], { steps: this.steps, after: this.after }));
  }

  #label() {
    this.range.value = this.after;
    this.range.setAttribute("aria-valuetext", `after step ${this.after} of ${this.steps}`);
    this.output.textContent = `${this.after} / ${this.steps}`;
    this.button.textContent = this.playing && this.after < this.steps ? "Pause" : "Play";
  }
}
