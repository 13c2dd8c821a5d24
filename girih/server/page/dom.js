// Small helpers: elements, and numbers for people. Data only ever becomes text nodes, never markup.

export const byId = (id) => document.getElementById(id);

/** Make an element; `props` are its properties, `class` and `data-...` its attributes; children are nodes or text. */
export function element(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class" || name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** A square in a colour of the map. */
export function swatch(rgb) {
  const node = element("span", { class: "swatch", "aria-hidden": "true" });
  node.style.backgroundColor = `rgb(${rgb.join(" ")})`;
  return node;
}

/** Set a text, only if it is another one, so that selections and screen readers are left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const count = (value) => Math.round(value).toLocaleString("en");

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(value < 10 ? 2 : 1)} ${units[unit]}`;
}
