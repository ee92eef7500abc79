// One text, and two of them side by side.

import { events } from "/page/api.js";
import { el } from "/page/dom.js";
import { Figures } from "/page/figures.js";
import { Player } from "/page/player.js";
import { legend, TextView } from "/page/text.js";

const JUDGED = 4; // frames from one that the judge is asked about to the next

// Write into a player's text, with figures; gives the last frame
export async function written(request, player, number, figures, signal) {
  let last = null;
  let count = 0;
  for await (const [, frame] of events("/play/write", request, signal)) {
    last = frame;
    player.push(number, frame);
    figures?.show(frame);
    if (++count % JUDGED === 0 && !frame.done) figures?.soFar(request.model, frame, signal);
  }
  return last;
}

export function panel(root, app) {
  const view = new TextView("The text", { empty: "Press Write: all places are masked at first, and each step fills some of them." });
  const player = new Player([view]);
  const figures = new Figures();
  const key = el("div", {});
  const on = el("button", { type: "button", class: "plain", hidden: true, onclick: () => app.fill(last, request.model, request.steps) }, "Fill in parts of this text");
  let last = null;
  let request = {};
  root.append(key, view.root, player.root, figures.root, el("p", { class: "note" }, on));

  return {
    verb: "Write",
    async go(signal) {
      const { model, prompt, steps, seed, temperature, order } = app.settings();
      key.replaceChildren(legend(steps, root));
      view.clear();
      figures.clear();
      on.hidden = true;
      player.start(steps);
      request = { model, prompt, steps, seed, temperature, order };
      last = await written(request, player, 0, figures, signal);
      on.hidden = false;
      app.say(`Written in ${last.evaluations} network evaluations, ${Math.round(1000 * last.seconds)} milliseconds.`);
      await figures.judge(model, last, signal);
    },
    stop: () => player.stop(),
  };
}

export function beside(root, app) {
  const sides = ["the model", "the other model"].map((which) => {
    const title = el("h3", {}, which);
    const view = new TextView(`The text of ${which}`, { empty: "Press Write both." });
    const figures = new Figures();
    return { title, view, figures, root: el("div", {}, title, view.root, figures.root) };
  });
  const player = new Player(sides.map((side) => side.view), { wide: true });
  const key = el("div", {});
  root.append(
    el("p", { class: "lead" }, "Two models from the same seed in the same number of steps: the same places are revealed at the same moments, by the same draws. Only what the models know differs."),
    key, player.root, el("div", { class: "pair" }, ...sides.map((side) => side.root)));

  return {
    verb: "Write both",
    async go(signal) {
      const { model, other, prompt, steps, seed, temperature, ...chosen } = app.settings();
      const order = chosen.order ?? app.model(model).order; // one for both
      key.replaceChildren(legend(steps, root));
      player.start(steps);
      await Promise.all([model, other].map(async (name, i) => {
        const { title, view, figures } = sides[i];
        view.clear();
        figures.clear();
        title.textContent = name;
        const last = await written({ model: name, prompt, steps, seed, temperature, order }, player, i, figures, signal);
        await figures.judge(name, last, signal);
      }));
      app.say("Both texts are written.");
    },
    stop: () => player.stop(),
  };
}
