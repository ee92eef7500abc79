// The page: settings, tabs, and who does what.

import { json, Problem, setKey } from "/page/api.js";
import { byId, calm, el } from "/page/dom.js";
import { fill } from "/page/fill.js";
import { noise } from "/page/noise.js";
import { hideTip } from "/page/text.js";
import { beside, panel } from "/page/write.js";

const field = Object.fromEntries(["prompt", "own", "model", "other", "steps", "temperature", "order", "seed", "key"].map((id) => [id, byId(id)]));
let models = [];
let here = "write";
let work = null;

const app = {
  settings: () => ({
    model: field.model.value, other: field.other.value, prompt: field.prompt.value, own: field.own.value,
    steps: Number(field.steps.value), temperature: Number(field.temperature.value), seed: Math.trunc(Number(field.seed.value)) || 0,
    order: field.order.value || null, // the model's own
  }),
  models: () => models,
  model: (name) => models.find((model) => model.name === name) ?? {},
  say: (sentence) => { byId("status").textContent = sentence; },
  reseed: () => { field.seed.value = app.settings().seed + 1; },
  fill: (frame, model, steps) => { field.model.value = model; shown(); panels.fill.take(frame, model, steps); open("fill"); },
};
const panels = { write: panel(byId("write"), app), beside: beside(byId("beside"), app), fill: fill(byId("fill"), app), noise: noise(byId("noise"), app) };
const tabs = Object.keys(panels).map((name) => byId(`tab-${name}`));

function open(name, focus = false) {
  here = name in panels ? name : "write";
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${here}`;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
    if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  byId("go").textContent = panels[here].verb;
  byId("prompt-field").hidden = here === "fill";
  byId("own-field").hidden = here !== "fill";
  byId("other-field").hidden = here !== "beside";
  problem(null);
  hideTip();
  history.replaceState(null, "", `#${here}`);
  read();
}

// Words can be selected once the text is there in the model's tokens
function read() {
  if (here === "fill" && models.length && !panels.fill.ready) run((signal) => panels.fill.make(signal));
}

function problem(error) {
  const place = byId("problem");
  place.hidden = error === null;
  if (error?.status === 401) {
    byId("key-field").hidden = false;
    place.textContent = `${field.key.value ? "This key is wrong" : "This service asks for a key"}: enter it under “Key of this service”, then press ${byId("go").textContent}.`;
    field.key.focus();
  } else {
    place.textContent = error === null ? "" : error instanceof Problem ? error.message : `Something went wrong on this page: ${error.message}`;
  }
  if (error !== null) place.scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" });
}

// One thing at a time: who asks anew lets go of what was asked before
async function run(doing) {
  if (work) {
    work.abort();
    stop();
  }
  const mine = (work = new AbortController());
  problem(null);
  byId("go").setAttribute("aria-busy", "true");
  try {
    await doing(mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) {
      stop();
      problem(error);
    }
  } finally {
    if (work === mine) {
      work = null;
      byId("go").removeAttribute("aria-busy");
    }
  }
}

function stop() {
  for (const each of Object.values(panels)) each.stop?.();
}

function shown() {
  byId("steps-shown").textContent = field.steps.value;
  byId("temperature-shown").textContent = Number(field.temperature.value) === 0 ? "0, the likeliest" : field.temperature.value;
  field.order.options[0].textContent = `as the model does (${app.model(field.model.value).order ?? "random"})`;
  byId("about").textContent = app.model(field.model.value).about ?? "";
  byId("about-other").textContent = app.model(field.other.value).about ?? "";
}

// Another model beside, where there is one; rather one without noise
function moveOn() {
  const others = models.filter(({ name }) => name !== field.model.value);
  field.other.value = (others.filter((model) => !model.noisy).at(-1) ?? others[0] ?? models[0]).name;
}

async function begin(signal) {
  const served = await json("/play/models", null, signal);
  models = served.models;
  field.steps.max = served.steps;
  for (const select of [field.model, field.other]) select.replaceChildren(...models.map(({ name }) => el("option", { value: name }, name)));
  field.model.value = models[0].name; // the first that was given to the service
  moveOn();
  shown();
  if (here === "fill") await panels.fill.read(signal);
}

byId("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  const below = matchMedia("(max-width: 60rem)").matches; // the text is not to be seen from here
  if (below) byId("stage").scrollIntoView({ behavior: calm() ? "auto" : "smooth" });
  run(async (signal) => {
    const known = models.length > 0;
    if (!known) await begin(signal);
    if (known || here !== "fill") await panels[here].go(signal); // where a text has just come, nothing is selected yet
  });
});
byId("settings").addEventListener("input", shown);
field.model.addEventListener("input", () => { if (field.model.value === field.other.value) moveOn(); });
field.model.addEventListener("change", read);
byId("reseed").addEventListener("click", () => { field.seed.value = Math.floor(Math.random() * 1e6); });
byId("take").addEventListener("click", () => run((signal) => panels.fill.read(signal)));
field.key.addEventListener("input", () => setKey(field.key.value));
for (const area of [field.prompt, field.own]) {
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("settings").requestSubmit();
  });
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => open(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: (i + 1) % tabs.length, ArrowLeft: i - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(tabs.at(to).id.slice(4), true);
  });
});
addEventListener("hashchange", () => open(location.hash.slice(1)));
open(location.hash.slice(1) || "write");
run(begin);
