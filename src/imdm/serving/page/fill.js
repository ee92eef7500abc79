// Select words: they become holes and are written again. Or the other way round: they are kept, and the rest is.

import { json } from "/page/api.js";
import { el } from "/page/dom.js";
import { Figures } from "/page/figures.js";
import { Player } from "/page/player.js";
import { legend, TextView } from "/page/text.js";
import { written } from "/page/write.js";

export function fill(root, app) {
  const view = new TextView("Words to select", { choose, empty: "Take a text first." });
  const player = new Player([view]);
  const figures = new Figures();
  const key = el("div", {});
  const notice = el("p", { class: "note" });
  const modes = [["hole", "Rewrite selection"], ["keep", "Keep selection"]].map(([name, words]) =>
    el("button", { type: "button", class: "plain", "data-mode": name, "aria-pressed": String(name === "hole"), onclick: () => into(name) }, words));
  const clear = el("button", { type: "button", class: "plain", onclick: () => { chosen.clear(); draw(); } }, "Select nothing");
  root.append(
    el("p", { class: "lead" }, "Select words with the mouse or a tap, or go there with the arrow keys and press the space bar; Shift and an arrow selects more. What is not to be written again stays as it is."),
    el("div", { class: "row" }, el("div", { class: "row", role: "group", "aria-label": "What a selection means" }, ...modes), clear),
    notice, key, view.root, player.root, figures.root);
  let frame = null;
  let steps = 1;
  let mode = "hole";
  let request = "";
  let tokenizer = null;
  let own = null; // what "Your text" was when a text was taken
  let writing = false;
  const chosen = new Set();

  const edited = () => own !== app.settings().own;
  const writable = () => frame.ids.map((_, i) => i).filter((i) => frame.pieces[i]);
  const holes = () => (mode === "hole" ? [...chosen] : writable().filter((i) => !chosen.has(i))).sort((a, b) => a - b);

  function choose(tokens, only = false) {
    const all = tokens.every((i) => chosen.has(i));
    for (const i of tokens) if (all && !only) chosen.delete(i); else chosen.add(i);
    player.stop();
    draw();
  }

  function into(name) {
    mode = name;
    for (const button of modes) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    draw();
  }

  function draw() {
    if (!frame) return;
    view.show(frame, { steps, chosen, hole: mode === "hole" });
    const many = holes().length;
    notice.textContent = many ? `${many} of ${writable().length} tokens will be written again.` : mode === "hole" ? "Nothing is selected yet." : "Everything is kept.";
  }

  // A text in the tokens of a model, written in so many steps
  function take(source, model, of = 1) {
    player.stop();
    player.root.hidden = true;
    figures.clear();
    key.replaceChildren();
    frame = source;
    tokenizer = app.model(model).tokenizer;
    own = app.settings().own;
    steps = of;
    chosen.clear();
    draw();
  }

  const panel = {
    verb: "Refill",
    take,
    async read(signal, text = app.settings().own) {
      const { model } = app.settings();
      const source = await json("/play/tokens", { model, text }, signal);
      take({ ...source, revealed_at: source.ids.map(() => -1), probability: source.ids.map(() => 1) }, model);
      app.say("The text is ready: select words.");
    },
    // Whether there is a text in the tokens of the chosen model; another may have other ones
    get ready() { return frame !== null && app.model(app.settings().model).tokenizer === tokenizer; },
    make: (signal) => panel.read(signal, edited() ? undefined : frame?.pieces.join("")),
    async go(signal) {
      if (edited()) { // nothing is selected in it yet
        await panel.read(signal);
        notice.textContent = "This is your text as it is now: select words, then press Refill.";
        return;
      }
      if (!panel.ready) await panel.make(signal);
      const row = [...frame.ids];
      for (const i of holes()) row[i] = null;
      const same = JSON.stringify([row, app.settings()]);
      if (same === request) app.reseed(); // the same again would be the same text
      const { model, steps: many, seed, temperature, order } = app.settings();
      request = JSON.stringify([row, app.settings()]);
      figures.clear();
      player.start(many);
      writing = true;
      frame = await written({ model, row, steps: many, seed, temperature, order }, player, 0, figures, signal);
      writing = false;
      steps = many;
      key.replaceChildren(legend(steps, root));
      notice.textContent = `${holes().length} tokens were written again; press Refill for others.`;
      app.say(notice.textContent);
      await figures.judge(model, frame, signal);
    },
    // What is half written is dropped: the text from before is there again
    stop() {
      player.stop();
      if (!writing) return;
      writing = false;
      player.root.hidden = true;
      draw();
    },
  };
  return panel;
}
