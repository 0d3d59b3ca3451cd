// The widget: what happens when the reader drags a boundary, presses a key, or moves a slider. In notebooks anywidget
// calls `render`; the page without a kernel calls it with a model that answers questions itself.

const PLAY_S = 8;
const EVENT_S = 0.7; // time that Play stays at each event for readers who want no motion
const SETTLED_MS = 400;
const PATIENCE_MS = 1000;
const WAITING = "Waiting for the kernel…";

export function render({ model, el }) {
  const data = model.get("data");
  const view = createView(data);
  el.append(view.root);
  const state = stateAtStart(data);
  const asker = createAsker(model, receive);
  const frame = frames(redraw);
  const settle = debounced(() => announce(view, state), SETTLED_MS);
  const complain = debounced(() => setText(view.status, asker.isWaiting() ? WAITING : ""), PATIENCE_MS);

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
