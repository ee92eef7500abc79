// A text whose tokens say when they appeared: by colour, by underline, in words on hover and focus.

import { byId, el } from "/page/dom.js";

const BANDS = 4; // kinds of underline
const UNKNOWN = ["░░", "░░░░", "░░░", "░░░░░", "░░░"]; // what a masked token takes the room of, until it is known

const UNPRINTABLE = /[\x00-\x08\x0b-\x1f\x7f]/g; // what a model may write byte by byte and nobody can see

export const band = (step, steps) => (steps <= 1 ? 2 : Math.min(BANDS - 1, Math.floor((BANDS * step) / steps)));
const share = (step, steps) => (steps <= 1 ? 0 : step / (steps - 1));

export class TextView {
  // choose: called with the numbers of tokens that were clicked or selected; without it the text is for reading
  constructor(label, { choose = null, empty = "" } = {}) {
    this.choose = choose;
    this.root = el("div", { class: "text", role: choose ? "group" : "list", "aria-label": label, "data-empty": empty });
    this.cells = [];
    this.frame = null;
    this.current = 0;
    this.root.addEventListener("keydown", (event) => this.#key(event));
    this.root.addEventListener("pointerover", (event) => this.#tip(event.target));
    this.root.addEventListener("pointerout", hideTip);
    this.root.addEventListener("focusin", (event) => this.#focused(event.target));
    this.root.addEventListener("focusout", hideTip);
    if (choose) this.root.addEventListener("click", (event) => this.#click(event));
  }

  clear() {
    this.frame = null;
    this.cells = [];
    this.root.replaceChildren();
  }

  // A frame as it was after so many steps; changed: numbers of tokens that are marked; chosen: those that are selected
  show(frame, { steps, after = steps, changed = null, chosen = null, hole = true } = {}) {
    if (this.cells.length !== frame.ids.length) this.#build(frame.ids.length);
    this.frame = frame;
    frame.ids.forEach((_, i) => this.#cell(i, frame, { steps, after, changed, chosen, hole }));
    this.root.classList.toggle("choosing", chosen !== null);
    this.root.classList.toggle("keeping", chosen !== null && !hole);
    if (!this.#reachable(this.current)) this.#reach(this.cells.findIndex((_, i) => this.#reachable(i)), false);
  }

  #build(many) {
    this.cells = Array.from({ length: many }, (_, i) => {
      const space = document.createTextNode("");
      const span = el("span", { class: "token", role: this.choose ? "checkbox" : "listitem", tabindex: "-1" });
      span.index = i;
      return { space, span };
    });
    this.root.replaceChildren(...this.cells.flatMap(({ space, span }) => [space, span]));
    this.current = -1;
  }

  #cell(i, frame, { steps, after, changed, chosen, hole }) {
    const { space, span } = this.cells[i];
    const [piece, step] = [frame.pieces[i], frame.revealed_at[i]];
    const given = piece !== null && step < 0; // steps count from 0
    const masked = piece === null || (!given && step >= after);
    const text = piece?.replace(UNPRINTABLE, "\ufffd") ?? ` ${UNKNOWN[(i * 7) % UNKNOWN.length]}`;
    const lead = text.match(/^\s*/)[0];
    const inner = lead.length < text.length ? text.slice(lead.length) : text;
    set(space, lead.length < text.length ? lead : "");
    set(span, inner);
    span.hidden = text === "";
    const picked = chosen !== null && chosen.has(i);
    const written = !given && !masked;
    span.className = [
      "token", given && "given", masked && "masked", written && `written band-${band(step, steps)}`,
      written && step === after - 1 && after < steps && "new", changed?.has(i) && !masked && "changed",
      picked && "chosen", picked && hole && "hole",
    ].filter(Boolean).join(" ");
    if (written) {
      span.style.setProperty("--late-share", share(step, steps));
      span.dataset.step = step;
    }
    span.told = masked ? "masked" : given ? "given" : `step ${step} of 0–${steps - 1} · probability ${told(frame.probability[i])}`;
    span.setAttribute("aria-label", `${masked ? "" : inner.trim() || "space"} ${span.told}`.trim());
    if (this.choose) span.setAttribute("aria-checked", String(picked));
  }

  #reachable(i) {
    return i >= 0 && i < this.cells.length && !this.cells[i].span.hidden && (!this.choose || this.wordOf(i)[0] === i);
  }

  // The numbers of the tokens that make up the word of token i
  wordOf(i) {
    const shown = (k) => this.frame.pieces[k] !== "";
    const begins = (k) => this.frame.pieces[k] === null || /^\s/.test(this.frame.pieces[k]);
    let first = i;
    while (first > 0 && !begins(first) && shown(first - 1) && this.frame.pieces[first - 1] !== null) first--;
    const word = [first];
    for (let k = first + 1; k < this.cells.length && shown(k) && !begins(k); k++) word.push(k);
    return word;
  }

  #reach(i, focus = true) {
    if (i < 0) return;
    if (this.cells[this.current]) this.cells[this.current].span.tabIndex = -1;
    this.current = i;
    this.cells[i].span.tabIndex = 0;
    if (focus) this.cells[i].span.focus();
  }

  #key(event) {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (this.choose && (event.key === " " || event.key === "Enter")) {
      event.preventDefault();
      this.choose(this.wordOf(this.current));
    } else if (way) {
      event.preventDefault();
      if (this.choose && event.shiftKey) this.choose(this.wordOf(this.current), true);
      let next = this.current + way;
      while (next >= 0 && next < this.cells.length && !this.#reachable(next)) next += way;
      if (this.#reachable(next)) {
        this.#reach(next);
        if (this.choose && event.shiftKey) this.choose(this.wordOf(next), true);
      }
    } else if (event.key === "Home" || event.key === "End") {
      event.preventDefault();
      const all = this.cells.map((_, i) => i).filter((i) => this.#reachable(i));
      this.#reach(event.key === "Home" ? all[0] : all.at(-1));
    }
  }

  #click(event) {
    const selection = getSelection();
    if (!selection.isCollapsed && this.root.contains(selection.anchorNode)) {
      const range = selection.getRangeAt(0);
      const inside = this.cells.map((_, i) => i).filter((i) => !this.cells[i].span.hidden && range.intersectsNode(this.cells[i].span));
      selection.removeAllRanges();
      this.choose([...new Set(inside.flatMap((i) => this.wordOf(i)))], true);
    } else if (event.target.index !== undefined) {
      this.choose(this.wordOf(event.target.index));
    }
  }

  #focused(target) {
    if (target.index === undefined) return;
    if (target.index !== this.current) this.#reach(target.index, false);
    this.#tip(target);
  }

  #tip(target) {
    if (target.told && !(this.choose && target.classList.contains("given"))) showTip(target, target.told);
  }
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const told = (probability) => (probability >= 0.995 ? "> 0.99" : probability < 0.005 ? "< 0.01" : probability.toFixed(2));

function showTip(target, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = false;
  const [box, size] = [target.getClientRects()[0] ?? target.getBoundingClientRect(), tip.getBoundingClientRect()];
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - size.width - 8));
  const above = box.top - size.height - 6;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above < 4 ? box.bottom + 6 : above) + scrollY}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

// What colours and underlines mean, and a switch for numbers. where: the element whose texts are numbered
export function legend(steps, where) {
  const item = (name, first, last) => {
    const token = el("span", { class: `token written band-${band(first, steps)}` }, name);
    token.style.setProperty("--late-share", share((first + last) / 2, steps));
    return el("li", {}, token);
  };
  const few = steps <= BANDS;
  const edges = Array.from({ length: BANDS }, (_, k) => Math.ceil((k * steps) / BANDS));
  const spans = edges.map((first, k) => [first, (edges[k + 1] ?? steps) - 1]).filter(([first, last]) => first <= last);
  const items = few
    ? Array.from({ length: steps }, (_, k) => item(`step ${k}`, k, k))
    : spans.map(([first, last]) => item(first === last ? `step ${first}` : `steps ${first}–${last}`, first, last));
  const box = el("input", { type: "checkbox", checked: where.classList.contains("numbered") });
  box.addEventListener("change", () => where.classList.toggle("numbered", box.checked));
  const given = el("li", {}, el("span", { class: "token given" }, "given"));
  return el("ul", { class: "legend", "aria-label": "Legend" }, given, ...items, el("li", {}, el("label", {}, box, "step numbers, from 0")));
}

// Which tokens of two frames differ, and which share of those that were written
export function compared(one, other) {
  const counted = one.ids.map((_, i) => i).filter((i) => (one.revealed_at[i] >= 0 || other.revealed_at[i] >= 0) && (one.pieces[i] || other.pieces[i]));
  const changed = new Set(counted.filter((i) => one.ids[i] !== other.ids[i]));
  return { changed, share: counted.length ? changed.size / counted.length : 0 };
}
