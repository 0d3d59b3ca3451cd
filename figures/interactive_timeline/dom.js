// Elements of a page, changed only where they differ, and at most once a frame.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

/** The elements below a root that have a `data-name`, by that name. */
function namedElements(root) {
  return Object.fromEntries([...root.querySelectorAll("[data-name]")].map((one) => [one.dataset.name, one]));
}

function matchCount(parent, count, create) {
  while (parent.children.length < count) parent.append(create());
  while (parent.children.length > count) parent.lastElementChild.remove();
}

/** Set attributes only if they change, so that the browser has less to do. */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

const NOT_SHOWN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]/g;

/** Show words; characters that control the direction of text, which names may contain, are escaped. */
function setText(element, words) {
  const shown = String(words).replace(NOT_SHOWN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
  if (element.textContent !== shown) element.textContent = shown;
}

function setValue(input, value, words) {
  if (input.value !== String(value)) input.value = value;
  if (words === undefined) return;
  setText(input.parentElement.querySelector("b"), words);
  setAttributes(input, { "aria-valuetext": words });
}

/** Call `redraw` once in the next frame, however often it is requested. */
function frames(redraw) {
  let requested = 0;
  const run = () => {
    redraw(); // what it requests itself is drawn already
    requested = 0;
  };
  return { request: () => (requested ||= requestAnimationFrame(run)), stop: () => cancelAnimationFrame(requested) };
}

function debounced(action, wait_ms) {
  let timer = 0;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait_ms);
  };
  later.stop = () => clearTimeout(timer);
  return later;
}
