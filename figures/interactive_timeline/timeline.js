// The timeline of one iteration: controls, table, picture and scrubber, on the page as in the notebook's widget.
//
// Its owner has `scenes`, `gbit`, `gpus` and `cap`, the words of each choice; `most_straggling`, the largest factor of the
// straggler; `start`, the choices at the start; and, of choices or of the state,
//   dataOf(choices), layoutAt(choices)   `names` and `sizes_bytes` of the model; the layout of a scene and cap
//   update(state)                        sets `answer`, `answered` and `baseline` of the state, at once or later
//   namesOf(state), noteOn(state)        the names of answer and baseline; a sentence beside the scrubber, or null
//   settled(state)                       called when the reader has stopped

const PARTS = ["computation_ns", "copies_ns", "launches_ns", "exposed_ns", "slowdown_ns", "stragglers_ns"];
const SETTLED_MS = 300;

function openTimeline(root, owner) {
  setAttributes(root, { "data-lm-suppress-shortcuts": "true" }); // JupyterLab would take the arrow keys
  const view = viewOf(root, owner);
  const state = {
    ...{ choices: owner.start, layout: owner.layoutAt(owner.start), answer: null, answered: null, baseline: null },
    ...{ cursor_ns: null, chosen: -1, dragging: false, isGuessing: false, longest_ns: 0 },
  };
  const frame = frames(redraw);
  const settle = debounced(() => {
    redraw(); // a busy browser may not have drawn a frame yet
    owner.settled(state);
    if (state.answer && state.baseline) setText(view.result, inWords(owner, state));
    frame.request();
  }, SETTLED_MS);

  function redraw() {
    const begin = performance.now();
    owner.update(state);
    if (state.answer && state.baseline && view.picture.clientWidth) draw(owner, view, state);
    root.dispatchEvent(new CustomEvent("redraw", { detail: { ms: performance.now() - begin } }));
  }

  function change(changed) {
    Object.assign(state, changed);
    frame.request();
    settle();
  }

  /** Change some choices; all but network, number of GPUs and straggler discard moved boundaries. */
  function choose(changed) {
    const choices = { ...state.choices, ...changed };
    const isKept = Object.keys(changed).every((name) => ["gbit", "gpus", "factor"].includes(name));
    change(isKept ? { choices } : { choices, layout: owner.layoutAt(choices), chosen: -1 });
  }

  const actions = { change, choose, frame, settle };
  connectControls(view, state, actions);
  connectBoundaries(view, state, actions);
  connectScrubber(view, state, actions);
  const resized = new ResizeObserver(() => frame.request());
  resized.observe(root);
  const stop = () => [() => resized.disconnect(), frame.stop, settle.stop].forEach((one) => one());
  return { view, state, stop, redraw, ...actions };
}

function viewOf(root, owner) {
  const view = { root, ...namedElements(root), controls: {}, rows: {} };
  for (const input of root.querySelectorAll(".controls input")) {
    view.controls[input.name] = input;
    input.max = owner[input.name] ? owner[input.name].length - 1 : owner.most_straggling;
  }
  for (const row of root.querySelectorAll("tbody tr")) view.rows[row.className] = row;
  const button = (words) => h("li", {}, h("button", { type: "button", class: "scene" }, words));
  view.scenes.append(...owner.scenes.map(button));
  return view;
}

function connectControls(view, state, { choose, change }) {
  [...view.scenes.children].forEach((one, scene) => one.addEventListener("click", () => choose({ scene })));
  for (const [name, input] of Object.entries(view.controls)) {
    input.addEventListener("input", () => choose({ [name]: Number(input.value) }));
  }
  view.split.addEventListener("click", () => {
    const { layout, boundary } = withLargestSplit(state.layout, state.shown.bytesBefore);
    if (boundary >= 0) change({ layout, chosen: boundary });
  });
  view.remove.addEventListener("click", () => removeBoundary(state, change));
  view.reset.addEventListener("click", () => choose({ scene: state.choices.scene }));
}

// Drawing

function draw(owner, view, state) {
  const data = owner.dataOf(state.choices);
  const { answer, layout, isGuessing } = state;
  const shown = shownOf(data, layout);
  const width = view.picture.clientWidth;
  const axis = currentAxis(state, width);
  const geometry = geometryOf(width, answer, axis.end, shown.bytesBefore.at(-1));
  Object.assign(state, { geometry, shown, axis });
  const cursor_ns = state.cursor_ns ?? (isGuessing ? axis.end / 2 : backwardEnd(answer));
  const isLocked = layout.noun !== "bucket" || isGuessing;
  drawPicture(view, state, cursor_ns);
  drawBoundaries(view, state, isLocked);
  drawMoment(view, state, cursor_ns, data.sizes_bytes);
  drawControls(owner, view, state);
  drawParts(owner, view, state);
  setText(view.note, owner.noteOn(state) ?? (isLocked ? "" : aboutBoundary(data, state)));
  view.root.classList.toggle("locked", isLocked);
  view.root.classList.toggle("guessing", isGuessing);
}

/** The axis ends after both iterations; while the reader drags, it does not become shorter. */
function currentAxis(state, width) {
  const longest = Math.max(state.answer.iteration_ns, state.baseline.iteration_ns);
  state.longest_ns = state.dragging ? Math.max(state.longest_ns, longest) : longest;
  return axisOf(state.longest_ns, Math.max(3, Math.min(12, width / 100)));
}

function drawControls(owner, view, { choices, layout, shown, chosen }) {
  const { gbit, gpus, factor, cap } = view.controls;
  const isMovable = layout.noun === "bucket";
  setValue(gbit, choices.gbit, owner.gbit[choices.gbit]);
  setValue(gpus, choices.gpus, owner.gpus[choices.gpus]);
  setValue(factor, choices.factor, choices.factor > 1 ? `× ${choices.factor}` : "none");
  setValue(cap, choices.cap, layout.edited ? "moved" : isMovable ? owner.cap[choices.cap] : layout.noun === "tensor" ? "none" : "one each");
  cap.disabled = !isMovable;
  [...view.scenes.children].forEach(({ firstChild }, scene) => {
    setAttributes(firstChild, { "aria-current": scene === choices.scene ? "step" : "false" });
  });
  view.split.disabled = withLargestSplit(shown.layout, shown.bytesBefore).boundary < 0;
  view.remove.disabled = chosen < 0;
  view.reset.disabled = !layout.edited;
}

function drawParts(owner, view, state) {
  const { isGuessing } = state;
  const [now, then] = [state.answer, state.baseline].map(roundedParts);
  owner.namesOf(state).forEach((name, row) => setText(Object.values(view.rows)[row].cells[0], name));
  ["iteration_ns", ...PARTS].forEach((part, column) => {
    const cells = ["now", "baseline", "difference"].map((row) => view.rows[row].cells[column + 1]);
    const changed = (now[part] ?? 0) - (then[part] ?? 0);
    const sign = changed < 0 ? "−" : "+";
    setText(cells[0], isGuessing ? "?" : tenths(now[part] ?? 0));
    setText(cells[1], tenths(then[part] ?? 0));
    setText(cells[2], isGuessing ? "" : changed ? `${sign}${tenths(Math.abs(changed))}` : "0");
    cells[2].classList.toggle("worse", changed > 0 && !isGuessing);
  });
  view.root.classList.toggle("slowed", Boolean(now.slowdown_ns || then.slowdown_ns));
}

const tenths = (ns) => (ns / 1e6).toFixed(1);

function aboutBoundary(data, { chosen, shown }) {
  const { cuts, sequence } = shown.layout;
  if (!cuts[chosen]) return "Drag a boundary between buckets, or choose one with Tab and move it with the arrow keys.";
  const [before, after] = [cuts[chosen] - 1, cuts[chosen]].map((place) => data.names[sequence[place]]);
  return `Chosen boundary: between ${before} and ${after}; ${bytesAround(shown, chosen)}.`;
}

/** The result for readers who hear the page. */
function inWords(owner, state) {
  const { answer, baseline, isGuessing } = state;
  if (isGuessing) return "";
  const changed_ns = answer.iteration_ns - baseline.iteration_ns;
  const much = `${milliseconds(Math.abs(changed_ns))} ${changed_ns < 0 ? "less" : "more"} than`;
  const exposed = milliseconds(answer.exposed_ns);
  return `Iteration ${milliseconds(answer.iteration_ns)}, ${much} ${owner.namesOf(state)[1]}; exposed communication ${exposed}.`;
}
