// What masks carry: kept or redrawn; noise against draws; the way from one noise to another.

import { events } from "/page/api.js";
import { el, percent } from "/page/dom.js";
import { Player } from "/page/player.js";
import { compared, legend, TextView } from "/page/text.js";
import { written } from "/page/write.js";

// Points of a way: fewer where each takes more evaluations
const pointsOf = (steps) => (steps <= 8 ? 33 : steps <= 32 ? 17 : 9);

export function noise(root, app) {
  const parts = [policies(app), deciders(app), way(app)];
  root.append(el("p", { class: "lead" }, "Each masked place may carry noise ε of its own. The network reads it, and so ε can decide what is written before any token is drawn. A model with a single mask has none."));
  root.append(...parts.map((part) => part.root));
  return {
    verb: "Run",
    async go(signal) {
      for (const text of root.querySelectorAll(".text")) text.dataset.empty = "Working, one part after another.";
      for (const part of parts) await part.go(signal);
      app.say("All three are done.");
    },
    stop: () => parts.forEach((part) => part.stop?.()),
  };
}

const column = (title, view) => el("div", {}, title, view.root);
const NONE = "The mask of this model carries no noise: there is nothing to keep, to redraw or to go along.";

// (a) The same seed with noise kept from step to step and with noise redrawn as the process says
function policies(app) {
  const names = [["keep", "Noise kept"], ["posterior", "Noise redrawn"]];
  const views = names.map(([, title]) => new TextView(title, { empty: "Press Run." }));
  const player = new Player(views, { wide: true });
  const key = el("div", {});
  const notice = el("p", { class: "note", id: "policies-said" });
  const root = el("section", { class: "part", "aria-labelledby": "policies" },
    el("h2", { id: "policies" }, "Kept or redrawn"),
    el("p", { class: "lead" }, "While a place stays masked, its ε is kept from step to step, or redrawn as the reverse process says."),
    key, el("div", { class: "pair" }, ...views.map((view, i) => column(el("h3", {}, names[i][1]), view))), player.root, notice);
  return {
    root,
    async go(signal) {
      const { model, prompt, steps, seed, temperature, order } = app.settings();
      key.replaceChildren(legend(steps, root));
      notice.textContent = "";
      player.start(steps);
      const request = { model, prompt, steps, seed, temperature, order };
      const frames = await Promise.all(names.map(([name], i) => written({ ...request, noise: name }, player, i, null, signal)));
      const { share } = compared(...frames);
      notice.textContent = !app.model(model).noisy ? NONE : steps === 1 ? "In one step nothing is redrawn: the texts are the same." : `${percent(share)} of the written tokens differ.`;
    },
    stop: () => player.stop(),
  };
}

// (b) Which of the two decides the text: the noise, or the draws of tokens?
function deciders(app) {
  const titles = ["As it was", "Same draws, new ε", "Same ε, new draws"].map((title) => el("h3", {}, title));
  const views = titles.map((title) => new TextView(title.textContent, { empty: "Press Run." }));
  const body = el("tbody");
  const table = el("table", { class: "bars", hidden: true },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Model"), el("th", { scope: "col" }, "New ε changes"), el("th", { scope: "col" }, "New draws change"))), body);
  const root = el("section", { class: "part plainly", "aria-labelledby": "deciders" },
    el("h2", { id: "deciders" }, "What decides the text?"),
    el("p", { class: "lead" }, "The same text twice more: once with the same draws of tokens and new noise, once with the same noise and new draws. Tokens that changed are marked. The fewer the steps, the more the noise can decide."),
    table, el("div", { class: "pair three" }, ...views.map((view, i) => column(titles[i], view))));
  let variants = new Map();

  function choose(name) {
    const [base, ...others] = variants.get(name);
    views[0].show(base, { steps: variants.steps });
    titles[0].replaceChildren("As it was", el("span", {}, `seed ${variants.seed}`));
    others.forEach((frame, i) => {
      const { changed, share } = compared(base, frame);
      views[i + 1].show(frame, { steps: variants.steps, changed });
      titles[i + 1].replaceChildren(["Same draws, new ε", "Same ε, new draws"][i], el("span", {}, `${percent(share)} changed`));
    });
    for (const button of body.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.textContent === name));
  }

  return {
    root,
    async go(signal) {
      const { model, prompt, steps, seed, temperature, order } = app.settings();
      variants = new Map();
      Object.assign(variants, { steps, seed });
      body.replaceChildren();
      table.hidden = false;
      const names = [model, ...app.models().map(({ name }) => name).filter((name) => name !== model)].slice(0, 6);
      for (const name of names) {
        const request = { model: name, prompt, steps, seed, temperature, order, noise: "keep" };
        const ways = [{}, { noise_seed: seed + 1 }, { draws_seed: seed + 1 }];
        variants.set(name, await Promise.all(ways.map((change) => ended({ ...request, ...change }, signal))));
        const [base, ...others] = variants.get(name);
        const bars = others.map((frame) => bar(compared(base, frame).share));
        const button = el("button", { type: "button", class: "plain", onclick: () => choose(name) }, name);
        body.append(el("tr", {}, el("th", { scope: "row" }, button), ...bars.map((cell) => el("td", {}, cell))));
        if (name === model) choose(name);
      }
    },
  };
}

function bar(share) {
  const line = el("i", { "aria-hidden": "true" });
  line.style.setProperty("--share", share);
  return el("div", { class: "bar" }, line, el("span", {}, percent(share)));
}

async function ended(request, signal) {
  let last = null;
  for await (const [, frame] of events("/play/write", request, signal)) last = frame;
  return last;
}

// (c) From one noise to another, the draws unchanged
function way(app) {
  const view = new TextView("The text at this point of the way", { empty: "Press Run." });
  const range = el("input", { type: "range", id: "way", min: "0", max: "0", value: "0", disabled: true, "aria-label": "From ε₁ to ε₂" });
  const flips = el("div", { class: "flips", "aria-hidden": "true" });
  const notice = el("p", { class: "note", id: "way-said" });
  const root = el("section", { class: "part plainly", "aria-labelledby": "way-title" },
    el("h2", { id: "way-title" }, "From ε₁ to ε₂"),
    el("p", { class: "lead" }, "The noise goes from one to another along a way on which every point has the distribution of the noise: on the sphere for normal noise, through the distribution function for uniform noise. The draws stay the same. Bars show how many tokens flip from one point to the next; at the point where you are, they are marked."),
    el("div", { class: "way" }, flips, range, el("div", { class: "ends" }, el("span", {}, "ε₁"), el("span", {}, "ε₂")), notice), view.root);
  let points = []; // with gaps while they come, finer and finer
  let steps = 1;

  function draw() {
    const here = Number(range.value);
    const frame = points[here];
    if (!frame) return;
    const like = (end) => (end ? percent(1 - compared(end, frame).share) : "–");
    const { changed } = compared(points[here - 1] ?? frame, frame);
    view.show(frame, { steps, changed });
    const [first, last] = [0, 1].map((s) => points.find((point) => point?.s === s));
    notice.textContent = `${like(first)} of the tokens as at ε₁, ${like(last)} as at ε₂; ${changed.size} flip here`;
    range.setAttribute("aria-valuetext", `${percent(frame.s)} of the way; ${notice.textContent}`);
    [...flips.children].forEach((mark, i) => mark.classList.toggle("here", i === here));
  }

  function marks() {
    const counts = Array.from(points, (_, i) => (points[i] && points[i - 1] ? compared(points[i - 1], points[i]).changed.size : 0));
    const most = Math.max(1, ...counts);
    flips.replaceChildren(...counts.map((count) => {
      const mark = el("i", { class: count ? "some" : "" });
      mark.style.setProperty("--share", count / most);
      return mark;
    }));
  }

  // The slider goes over the points there are, also where the way ended before all had come
  function settle() {
    points = points.filter(Boolean);
    range.max = Math.max(0, points.length - 1);
    range.disabled = points.length === 0;
    marks();
    draw();
  }

  range.addEventListener("input", draw);
  return {
    root,
    async go(signal) {
      const settings = app.settings();
      const { model, prompt, seed, temperature, order } = settings;
      steps = settings.steps;
      const mine = (points = Array(pointsOf(steps)).fill(null));
      range.max = points.length - 1;
      range.value = 0;
      range.disabled = true;
      view.clear();
      flips.replaceChildren();
      if (!app.model(model).noisy) {
        notice.textContent = NONE;
        return;
      }
      const request = { model, prompt, steps, seed, temperature, order, noise: "keep", between: [seed, seed + 1], points: points.length };
      try {
        for await (const [, point] of events("/play/path", request, signal)) {
          mine[point.point] = point;
          marks();
          draw();
        }
      } finally {
        if (mine === points) settle();
      }
    },
  };
}
