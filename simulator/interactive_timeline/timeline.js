// The widget: what happens when the reader drags a boundary, presses a key, or moves a slider. In notebooks anywidget
// calls `render`; the page without a kernel calls it with a model that answers questions itself.

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
