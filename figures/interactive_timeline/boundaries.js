// Boundaries between buckets: moved by the pointer or by keys.

const REACH_PX = { mouse: 10, pen: 14, touch: 24 };

function connectBoundaries(view, state, actions) {
  const { boundaries } = view;
  view.picture.addEventListener("pointerdown", (event) => {
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
  const movable = shown.layout.cuts.slice(0, view.boundaries.children.length); // all may be locked
  const distances = movable.map((cut) => Math.abs(geometry.y(shown.bytesBefore[cut]) - y));
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
  const released = new AbortController();
  const ofPointer = (name, action) => {
    const act = (event) => event.pointerId === pointerId && action(event);
    element.addEventListener(name, act, { signal: released.signal });
  };
  ofPointer("pointermove", move);
  ofPointer("lostpointercapture", () => {
    released.abort();
    done();
  });
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

function removeBoundary(state, change) {
  if (state.chosen < 0) return;
  const layout = withoutBoundary(state.layout, state.chosen);
  change({ layout, chosen: Math.min(state.chosen, layout.cuts.length - 1) });
}
