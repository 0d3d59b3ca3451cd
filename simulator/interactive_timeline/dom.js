// Elements of the page, changed only where they differ, and at most once a frame.

/** JupyterLab takes the arrow keys for its own commands, except from elements with this attribute. */
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function matchCount(parent, count, create) {
  while (parent.children.length < count) parent.append(create());
  while (parent.children.length > count) parent.lastElementChild.remove();
}

/** Set an attribute only if it changes, so that the browser has less to do. */
function setAttribute(element, name, value) {
  const words = String(value);
  if (element.getAttribute(name) !== words) element.setAttribute(name, words);
}

function setText(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

function setValue(input, value, words) {
  if (input.value !== String(value)) input.value = value;
  if (words === undefined) return;
  setText(input.output, words);
  setAttribute(input, "aria-valuetext", words);
}

/** Call `redraw` once in the next frame, however often it is requested. */
function frames(redraw) {
  let requested = 0;
  let isDrawing = false;
  const run = () => {
    requested = 0;
    isDrawing = true;
    redraw();
    isDrawing = false;
  };
  return {
    request: () => {
      if (!requested && !isDrawing) requested = requestAnimationFrame(run);
    },
    stop: () => cancelAnimationFrame(requested),
  };
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
