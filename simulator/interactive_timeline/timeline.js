// The widget: controls, result, picture with draggable bucket boundaries, and the scrubber. anywidget calls `render` in
// notebooks; the page without a kernel calls it with a model that answers questions itself.

const PATHS = [
  "stripe", "filling", "queued", "hidden", "exposed", "edge", "idle", "waiting", "forward", "backward", "copy",
  "late", "gradient", "curve", "axis", "cursor",
]; // later ones are drawn over earlier ones
const LEGEND = [
  ["forward", "forward pass"],
  ["backward", "backward pass"],
  ["copy", "copies and launches"],
  ["filling", "bucket fills"],
  ["queued", "full, waits for its turn"],
  ["hidden", "all-reduce, hidden behind computation"],
  ["exposed", "all-reduce, exposed: the slowest rank waits"],
  ["waiting", "rank waits for an all-reduce"],
  ["idle", "rank waits for the straggler"],
  ["gradient", "one gradient is ready"],
  ["late", "the same on the straggler"],
  ["curve", "bytes ready"],
];
const PLAY_S = 8;
const EVENT_S = 0.7; // time that Play stays at each event for readers who want no motion
const SETTLED_MS = 400;
const PATIENCE_MS = 1000;

export function render({ model, el }) {
  const data = model.get("data");
  const view = createView(data);
  el.append(view.root);
  const state = stateAtStart(data);
  const asker = createAsker(model, receive);
  const frame = frames(redraw);
  const settle = debounced(() => announce(view, state), SETTLED_MS);
  const complain = debounced(() => (view.status.textContent = asker.isWaiting() ? "Waiting for the kernel…" : ""), PATIENCE_MS);

  function receive(purpose, asked, reply) {
    view.error.textContent = reply.error ?? "";
    view.status.textContent = "";
    if (reply.answer && purpose === "now") Object.assign(state, { answer: reply.answer, answered: asked });
    if (reply.answer && purpose === "start") state.startAnswer = reply.answer;
    settle();
    frame.request();
  }

  /** Change the layout or the settings; the next frame asks the question. */
  function change(changed, { alsoStart = false } = {}) {
    Object.assign(state, changed, { asksNow: true, asksStart: state.asksStart || alsoStart });
    frame.request();
  }

  function redraw() {
    const begin = performance.now();
    askWhatChanged();
    if (state.answer && state.startAnswer && view.root.clientWidth) draw(data, view, state);
    el.dispatchEvent(new CustomEvent("redraw", { detail: { ms: performance.now() - begin } }));
  }

  function askWhatChanged() {
    if (state.asksNow) asker.ask("now", questionOf(data, state, state.layout), shownOf(data, state.layout));
    if (state.asksStart) asker.ask("start", questionOf(data, state, state.startLayout), null);
    if (state.asksNow || state.asksStart) complain();
    Object.assign(state, { asksNow: false, asksStart: false });
  }

  const actions = { change, frame, settle };
  connectControls(data, view, state, actions);
  connectBoundaries(data, view, state, actions);
  const stopPlaying = connectScrubber(view, state, actions);
  const resized = new ResizeObserver(() => frame.request());
  resized.observe(view.root);
  if (data.answer) showFirstAnswer(data, state);
  else change({}, { alsoStart: true });
  return () => {
    stopPlaying();
    resized.disconnect();
    frame.stop();
    settle.stop();
    complain.stop();
    asker.stop();
  };
}

export default { render };

// State

function stateAtStart(data) {
  const { order, cap, gbit_per_s, world_size } = data.start;
  const layout = layoutOf(data.layouts[order][cap]);
  return {
    order, cap, gbit_per_s, world_size, factor: 1,
    layout, startLayout: layout,
    answer: null, answered: null, startAnswer: null,
    asksNow: false, asksStart: false,
    cursor_ns: null, chosen: -1, dragging: false, longest_ns: 0,
  };
}

/** Show the answer that came with the data, for notebooks that are opened without a kernel. */
function showFirstAnswer(data, state) {
  const answered = shownOf(data, state.layout);
  Object.assign(state, { answer: data.answer, answered, startAnswer: data.answer });
}

function questionOf(data, state, layout) {
  return {
    plan: planOf(layout),
    world_size: data.world_sizes[state.world_size],
    gbit_per_s: data.gbit_per_s[state.gbit_per_s],
    factor: state.factor,
  };
}

/** A layout with what the picture needs of it. */
function shownOf(data, layout) {
  return {
    layout,
    ends: [...layout.cuts, layout.sequence.length],
    bytesBefore: bytesBeforePlaces(layout.sequence, data.sizes_bytes),
  };
}

/** The axis ends after both iterations; while the reader drags, it does not become shorter. */
function currentAxis(state, width) {
  const longest = Math.max(state.answer.iteration_ns, state.startAnswer.iteration_ns);
  state.longest_ns = state.dragging ? Math.max(state.longest_ns, longest) : longest;
  return axisOf(state.longest_ns, Math.max(3, Math.min(12, width / 80)));
}

// Elements

/** JupyterLab takes the arrow keys for its own commands, except from elements with this attribute. */
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };

function createView(data) {
  const view = { controls: {}, buttons: {}, cells: {} };
  view.error = h("p", { class: "error", role: "alert" });
  view.status = h("p", { class: "status", role: "status" });
  view.result = h("p", { class: "result", role: "status", "aria-live": "polite" });
  view.about = h("p", { class: "about" });
  view.moment = h("p", { class: "moment" });
  view.svg = svg("svg", { "aria-hidden": "true", focusable: "false" });
  view.boundaries = h("div", { class: "boundaries", role: "group", "aria-label": "Bucket boundaries" });
  view.picture = h("div", { class: "picture" }, view.svg, view.boundaries);
  view.paths = Object.fromEntries(PATHS.map((name) => [name, svg("path", { class: name })]));
  view.labels = svg("g", {});
  view.svg.append(...Object.values(view.paths), view.labels);
  view.root = h(
    "section",
    { class: "ddplab-timeline", "aria-label": `Interactive timeline of ${data.title}` },
    controlsOf(data, view),
    h("div", { class: "numbers" }, resultTable(view), view.result),
    view.picture,
    scrubberOf(view),
    view.moment,
    buttonsOf(view),
    view.about,
    view.status,
    view.error,
    legend(),
  );
  return view;
}

function controlsOf(data, view) {
  const orders = data.orders.map((order) => h("option", { value: order }, order));
  view.controls.order = h("select", OWN_KEYS, ...orders);
  const range = (name, most, least = 0, step = 1) => {
    view.controls[name] = h("input", { type: "range", min: least, max: most, step, ...OWN_KEYS });
    view.controls[name].output = h("b", {});
    return view.controls[name];
  };
  // (An element `output` would take the label for itself.)
  const labelled = (words, input) => h("label", {}, h("span", {}, words, " ", input.output ?? ""), input);
  return h(
    "div",
    { class: "controls" },
    labelled("Bucket cap:", range("cap", data.caps.length - 1)),
    labelled("Order:", view.controls.order),
    labelled("Network:", range("gbit_per_s", data.gbit_per_s.length - 1)),
    labelled("World size:", range("world_size", data.world_sizes.length - 1)),
    labelled("Straggler:", range("factor", data.most_straggling, 1, 0.05)),
  );
}

const ROWS = [
  ["iteration_ns", "Iteration"],
  ["exposed_ns", "Exposed communication"],
  ["stragglers_ns", "Waiting for the straggler"],
  ["compute_ns", "Computation alone"],
];

function resultTable(view) {
  const head = ["", "now", "start layout", "change"].map((words) => h("th", { scope: "col" }, words));
  const rows = ROWS.map(([name, words]) => {
    const cells = ["now", "start", "difference"].map((column) => h("td", { class: column }));
    view.cells[name] = cells;
    return h("tr", { class: name }, h("th", { scope: "row" }, words), ...cells);
  });
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}

function scrubberOf(view) {
  const name = { "aria-label": "Moment in the iteration" };
  view.scrubber = h("input", { type: "range", min: 0, step: 100000, ...name, ...OWN_KEYS });
  view.play = h("button", { type: "button", class: "play", ...OWN_KEYS }, "Play");
  return h("div", { class: "scrubber" }, view.play, view.scrubber);
}

function buttonsOf(view) {
  const button = (name, words) => (view.buttons[name] = h("button", { type: "button", ...OWN_KEYS }, words));
  return h(
    "div",
    { class: "buttons" },
    button("split", "Split the largest bucket"),
    button("remove", "Remove the chosen boundary"),
    button("compare", "Compare with this layout"),
    button("restart", "Start again"),
  );
}

function legend() {
  const entry = ([name, words]) => {
    const drawing = { gradient: "M7 2v10", late: "M7 2v10", curve: "M1 11h5v-8h7", queued: "M1 7h13" }[name] ?? "M1 2h13v10h-13z";
    const sample = svg("svg", { width: 15, height: 14, "aria-hidden": "true" });
    sample.append(svg("path", { class: name, d: drawing }));
    return h("li", {}, sample, words);
  };
  return h("ul", { class: "legend" }, ...LEGEND.map(entry));
}

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

// Drawing

function draw(data, view, state) {
  const shown = shownOf(data, state.layout);
  const width = view.picture.clientWidth;
  const axis = currentAxis(state, width);
  const geometry = geometryOf(width, state.answer, axis.end, shown.bytesBefore.at(-1));
  Object.assign(state, { geometry, shown, axis });
  state.cursor_ns ??= backwardEnd(state.answer);
  drawPicture(data, view, state);
  drawBoundaries(view, state);
  drawControls(data, view, state);
  drawResult(view, state);
  drawMoment(data, view, state);
}

function drawPicture(data, view, { geometry, answer, shown, answered, axis, cursor_ns }) {
  setAttribute(view.svg, "viewBox", `0 0 ${geometry.width} ${geometry.height}`);
  setAttribute(view.svg, "height", geometry.height);
  const paths = pathsOf(geometry, answer, shown, answered, data.sizes_bytes);
  paths.axis = axisPath(geometry, axis);
  paths.cursor = `M${r(geometry.x(cursor_ns))} 4V${geometry.axis + 5}`;
  for (const name of PATHS) setAttribute(view.paths[name], "d", paths[name] ?? "");
  const labels = labelsOf(geometry, answer, shown, axis);
  matchCount(view.labels, labels.length, () => svg("text", {}));
  labels.forEach(([name, x, y, words, anchor], number) => {
    const text = view.labels.children[number];
    setAttribute(text, "class", name);
    setAttribute(text, "x", r(x));
    setAttribute(text, "y", r(y));
    setAttribute(text, "text-anchor", anchor);
    setText(text, words);
  });
}

function drawBoundaries(view, { geometry, shown, chosen }) {
  const { cuts, sequence } = shown.layout;
  matchCount(view.boundaries, cuts.length, createBoundary);
  cuts.forEach((cut, boundary) => {
    const element = view.boundaries.children[boundary];
    const y = r(geometry.y(shown.bytesBefore[cut]));
    const width = r(geometry.right - geometry.left + 24);
    setAttribute(element, "style", `left: ${geometry.left - 24}px; width: ${width}px; transform: translateY(${y}px)`);
    element.classList.toggle("chosen", boundary === chosen);
    const [low, high] = limitsOf(shown.layout, boundary);
    setAttribute(element, "aria-label", `Boundary between bucket ${boundary} and bucket ${boundary + 1}`);
    setAttribute(element, "aria-valuemin", low);
    setAttribute(element, "aria-valuemax", high);
    setAttribute(element, "aria-valuenow", cut);
    setAttribute(element, "aria-valuetext", `after ${cut} of ${sequence.length} gradients; ${bytesAround(shown, boundary)}`);
  });
}

function createBoundary() {
  const attributes = { class: "boundary", role: "slider", tabindex: 0, "aria-orientation": "vertical" };
  return h("div", { ...attributes, ...OWN_KEYS }, h("span", { class: "knob" }));
}

/** The bytes of the two buckets beside a boundary, in words. */
function bytesAround({ bytesBefore, ends }, boundary) {
  const bytes = (bucket) => megabytes(bytesBefore[ends[bucket]] - bytesBefore[ends[bucket - 1] ?? 0]);
  return `bucket ${boundary} has ${bytes(boundary)}, bucket ${boundary + 1} has ${bytes(boundary + 1)}`;
}

function drawControls(data, view, state) {
  const { order, cap, gbit_per_s, world_size, factor } = view.controls;
  const isEdited = state.layout.edited;
  setValue(order, state.order);
  setValue(cap, state.cap, isEdited ? "changed" : data.caps[state.cap]);
  setValue(gbit_per_s, state.gbit_per_s, `${data.gbit_per_s[state.gbit_per_s]} Gbit/s`);
  setValue(world_size, state.world_size, `${data.world_sizes[state.world_size]}`);
  setValue(factor, state.factor, state.factor > 1 ? `factor ${state.factor}` : "none");
  const split = withLargestSplit(state.layout, state.shown.bytesBefore);
  view.buttons.split.disabled = split.boundary < 0;
  view.buttons.remove.disabled = state.chosen < 0;
  view.root.classList.toggle("dragging", state.dragging);
  setText(view.about, aboutChosen(data, state));
}

function setValue(input, value, words) {
  if (input.value !== String(value)) input.value = value;
  if (words === undefined) return;
  setText(input.output, words);
  setAttribute(input, "aria-valuetext", words);
}

function aboutChosen(data, { chosen, shown }) {
  const { cuts, sequence } = shown.layout;
  if (chosen < 0) return "Drag a boundary, or choose one with Tab and move it with the arrow keys.";
  const before = data.names[sequence[cuts[chosen] - 1]];
  const after = data.names[sequence[cuts[chosen]]];
  return `Chosen boundary: between ${before} and ${after}; ${bytesAround(shown, chosen)}.`;
}

function drawResult(view, { answer, startAnswer }) {
  for (const [name] of ROWS) {
    const [now, start, difference] = view.cells[name];
    const changed_ns = answer[name] - startAnswer[name];
    setText(now, milliseconds(answer[name]));
    setText(start, milliseconds(startAnswer[name]));
    setText(difference, signed(changed_ns));
    difference.classList.toggle("worse", changed_ns > 0);
  }
  const nobodyWaits = answer.stragglers_ns === 0 && startAnswer.stragglers_ns === 0;
  view.cells.stragglers_ns[0].parentElement.hidden = nobodyWaits && answer.ranks.length === 1;
}

function signed(ns) {
  const words = milliseconds(Math.abs(ns));
  if (words === milliseconds(0)) return "0";
  return `${ns < 0 ? "−" : "+"}${words}`;
}

/** Say the result when the reader has stopped dragging. */
function announce(view, { answer, startAnswer }) {
  if (!answer || !startAnswer) return;
  const difference = answer.iteration_ns - startAnswer.iteration_ns;
  const faster = `${milliseconds(Math.abs(difference))} ${difference < 0 ? "faster" : "slower"} than with the start layout`;
  const comparison = signed(difference) === "0" ? "as with the start layout" : faster;
  const exposed = milliseconds(answer.exposed_ns);
  const words = `Iteration ${milliseconds(answer.iteration_ns)}, ${comparison}; exposed communication ${exposed}.`;
  setText(view.result, words);
}

function drawMoment(data, view, { answer, answered, cursor_ns, axis, geometry }) {
  setAttribute(view.scrubber, "max", axis.end);
  setValue(view.scrubber, Math.round(cursor_ns / 1e5) * 1e5);
  const width = r(geometry.right - geometry.left + 16);
  setAttribute(view.scrubber, "style", `margin-left: ${geometry.left - 8}px; width: ${width}px`);
  const words = momentInWords(answer, answered, cursor_ns, data.sizes_bytes);
  setText(view.moment, words);
  setAttribute(view.scrubber, "aria-valuetext", words);
}

/** The state of the iteration at a moment. */
function momentInWords(answer, answered, now, sizes) {
  const { ready_ns } = answer.ranks[0];
  const readyBytes = sizes.reduce((bytes, size, index) => bytes + (ready_ns[index] <= now ? size : 0), 0);
  const sending = answer.collectives.filter(([bucket, , start, done]) => bucket !== null && start <= now && now < done);
  const waiting = answer.collectives.filter(([bucket, , start]) => {
    if (bucket === null || start <= now) return false;
    const members = answered.layout.sequence.slice(answered.ends[bucket - 1] ?? 0, answered.ends[bucket]);
    return fillingTimes(answer, members)[1] <= now;
  });
  const exposed = answer.exposed.reduce((ns, [start, end]) => ns + Math.max(0, Math.min(now, end) - start), 0);
  const total = sizes.reduce((bytes, size) => bytes + size, 0);
  return (
    `At ${milliseconds(now)}: ${(readyBytes / 1e6).toFixed(1)} of ${megabytes(total)} are ready; ` +
    `on the network: ${bucketNames(sending)}; full and waiting: ${bucketNames(waiting)}; ` +
    `exposed so far: ${milliseconds(exposed)}.`
  );
}

function bucketNames(collectives) {
  const numbers = collectives.map(([bucket]) => bucket);
  if (!numbers.length) return "nothing";
  if (numbers.length < 3) return `bucket${numbers.length > 1 ? "s" : ""} ${numbers.join(" and ")}`;
  return `${numbers.length} buckets, ${numbers[0]} to ${numbers.at(-1)}`;
}

function backwardEnd(answer) {
  return Math.max(...answer.ranks[0].spans.filter(([kind]) => kind === "backward").map(([, , , end]) => end));
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

// Controls

function connectControls(data, view, state, { change }) {
  const { order, cap, gbit_per_s, world_size, factor } = view.controls;
  const fill = () => {
    const chosen = { order: order.value, cap: Number(cap.value) };
    change({ ...chosen, layout: layoutOf(data.layouts[chosen.order][chosen.cap]), chosen: -1 });
  };
  cap.addEventListener("input", fill);
  order.addEventListener("change", fill);
  for (const [name, input] of Object.entries({ gbit_per_s, world_size, factor })) {
    input.addEventListener("input", () => change({ [name]: Number(input.value) }, { alsoStart: true }));
  }
  const { split, remove, compare, restart } = view.buttons;
  split.addEventListener("click", () => {
    const { layout, boundary } = withLargestSplit(state.layout, state.shown.bytesBefore);
    if (boundary >= 0) change({ layout, chosen: boundary });
  });
  remove.addEventListener("click", () => removeBoundary(state, change));
  compare.addEventListener("click", () => change({ startLayout: state.layout }, { alsoStart: true }));
  restart.addEventListener("click", () => {
    const { answer, answered, startAnswer, ...start } = stateAtStart(data);
    change(start, { alsoStart: true });
  });
}

function removeBoundary(state, change) {
  if (state.chosen < 0) return;
  const layout = withoutBoundary(state.layout, state.chosen);
  change({ layout, chosen: Math.min(state.chosen, layout.cuts.length - 1) });
}

// Boundaries

const REACH_PX = { mouse: 10, pen: 14, touch: 24 };

function connectBoundaries(data, view, state, actions) {
  const { picture, boundaries } = view;
  picture.addEventListener("pointerdown", (event) => {
    if (!state.geometry || event.button !== 0) return;
    const boundary = boundaryNear(view, state, event);
    event.preventDefault(); // neither select text nor scroll
    if (boundary >= 0) startDragging(view, state, actions, boundary, event);
    else startScrubbing(view, state, actions, event);
  });
  boundaries.addEventListener("focusin", (event) => {
    state.chosen = [...boundaries.children].indexOf(event.target);
    actions.frame.request();
  });
  boundaries.addEventListener("keydown", (event) => moveByKey(view, state, actions, event));
}

/** The boundary nearest to the pointer; -1 if none is within reach. */
function boundaryNear(view, { geometry, shown }, event) {
  const y = event.clientY - view.picture.getBoundingClientRect().top;
  const distances = shown.layout.cuts.map((cut) => Math.abs(geometry.y(shown.bytesBefore[cut]) - y));
  const nearest = distances.indexOf(Math.min(...distances));
  return distances[nearest] <= (REACH_PX[event.pointerType] ?? REACH_PX.mouse) ? nearest : -1;
}

function startDragging(view, state, { change, frame }, boundary, event) {
  state.chosen = boundary;
  state.dragging = true;
  view.boundaries.children[boundary].focus({ preventScroll: true });
  const move = ({ clientY }) => {
    const { panelBottom, panel } = state.geometry;
    const y = clientY - view.picture.getBoundingClientRect().top;
    const bytes = (state.shown.bytesBefore.at(-1) * (panelBottom - y)) / (panelBottom - panel);
    const place = nearestPlace(state.shown.bytesBefore, bytes, ...limitsOf(state.layout, boundary));
    if (place !== state.layout.cuts[boundary]) change({ layout: withBoundaryAt(state.layout, boundary, place) });
  };
  followPointer(view.picture, event, move, () => {
    state.dragging = false;
    frame.request();
  });
  frame.request();
}

function startScrubbing(view, state, { frame }, event) {
  const move = ({ clientX }) => {
    const { left, right } = state.geometry;
    const x = clientX - view.picture.getBoundingClientRect().left;
    const part = Math.min(1, Math.max(0, (x - left) / (right - left)));
    state.cursor_ns = part * state.axis.end;
    frame.request();
  };
  move(event);
  followPointer(view.picture, event, move, () => {});
}

/** Call `move` for every movement of a pointer until it is released, and then `done`. */
function followPointer(element, { pointerId }, move, done) {
  element.setPointerCapture(pointerId);
  const end = (event) => {
    if (event.pointerId !== pointerId) return;
    element.removeEventListener("pointermove", follow);
    element.removeEventListener("pointerup", end);
    element.removeEventListener("pointercancel", end);
    done();
  };
  const follow = (event) => event.pointerId === pointerId && move(event);
  element.addEventListener("pointermove", follow);
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
}

const KEYS = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 };

function moveByKey(view, state, { change }, event) {
  const boundary = [...view.boundaries.children].indexOf(event.target);
  if (boundary < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const [low, high] = limitsOf(state.layout, boundary);
  const place = { Home: low, End: high }[event.key] ?? state.layout.cuts[boundary] + (KEYS[event.key] ?? NaN);
  if (event.key === "Delete" || event.key === "Backspace") removeBoundary(state, change);
  else if (Number.isNaN(place)) return;
  else change({ layout: withBoundaryAt(state.layout, boundary, place), chosen: boundary });
  event.preventDefault(); // the arrow keys would scroll the page
}

// Scrubber

function connectScrubber(view, state, { frame }) {
  let playing = 0;
  const stop = () => {
    cancelAnimationFrame(playing);
    playing = 0;
    view.play.textContent = "Play";
  };
  const play = () => {
    const moments = eventMoments(state.answer);
    const begin = performance.now();
    const step = (now) => {
      const elapsed_s = Math.max(0, now - begin) / 1000; // a frame may have begun before the click
      const end = state.answer.iteration_ns;
      const byEvent = moments[Math.min(moments.length - 1, Math.floor(elapsed_s / EVENT_S))];
      state.cursor_ns = wantsNoMotion() ? byEvent : Math.min(end, (end * elapsed_s) / PLAY_S);
      frame.request();
      if (state.cursor_ns < end) playing = requestAnimationFrame(step);
      else stop();
    };
    view.play.textContent = "Stop";
    playing = requestAnimationFrame(step);
  };
  view.play.addEventListener("click", () => (playing ? stop() : play()));
  view.scrubber.addEventListener("input", () => {
    stop();
    state.cursor_ns = Number(view.scrubber.value);
    frame.request();
  });
  return stop;
}

function wantsNoMotion() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** The moments at which an all-reduce starts or ends, and the end of the iteration. */
function eventMoments(answer) {
  const moments = answer.collectives.flatMap(([, , start, done]) => [start, done]);
  return [...new Set([0, ...moments, answer.iteration_ns])].sort((a, b) => a - b);
}

// Time

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
