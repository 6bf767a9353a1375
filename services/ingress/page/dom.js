// Small builders. Text always goes in as text nodes: a title from the data can never become markup.

const SVG = document.querySelector("svg").namespaceURI;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Replace all children except <title> and <desc>, which name a drawing for screen readers. */
export function redraw(drawing, children) {
  drawing.replaceChildren(...drawing.querySelectorAll(":scope > title, :scope > desc"), ...children);
}

/** Milliseconds for a person: two or three digits that matter. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.05) return "<0.1 ms";
  if (value >= 100) return `${value.toFixed(0)} ms`;
  return `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)}%`;
export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
