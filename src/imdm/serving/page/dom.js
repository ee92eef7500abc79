// Elements without markup: whatever a model writes is text and nothing else.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export const percent = (share) => `${Math.round(100 * share)}%`;

export function short(number) {
  if (number === null || !Number.isFinite(number)) return "–";
  return number >= 100 ? Math.round(number).toLocaleString("en") : number.toPrecision(3);
}
