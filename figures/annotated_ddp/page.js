// The page: scenes, sliders, the goal, and dropped traces around the live timeline.

const PARTS = [
  ["iteration_ns", "total"],
  ["computation_ns", "compute"],
  ["copies_ns", "copies"],
  ["launches_ns", "launch"],
  ["exposed_ns", "exposed"],
  ["stragglers_ns", "straggler"],
];
const LINKS = [
  ["reference/minimal.py", "_modules/reference/minimal.html", "the code"],
  ["tutorials/02_build_your_own_ddp.ipynb", "tutorials/02_build_your_own_ddp.html", "build your own"],
  ["docs/glossary.md", "docs/glossary.html", "glossary"],
];
const NARROW_PX = 900; // as in page.css
const PANEL_PX = { wide: 240, narrow: 205 };
const TAKEN_PX = { rank: 36, goal: 34 }; // what a second rank, and the goal, take from the panel
const SETTLED_MS = 300;

function openPage(body, data) {
  const view = viewOf(data);
  body.append(view.header, view.live, view.about);
  const models = Object.fromEntries(data.models.map((trace) => [trace.workload.model, modelOfTrace(trace, data.gpus)]));
  const state = {
    ...{ choices: choicesAtStart(), models, modelName: data.models[0].workload.model },
    ...{ edited: null, seen: new Set([0]), guess_ns: null, cursor_ns: null, chosen: -1, dragging: false },
    ...{ drawn: {}, goals: new Map() },
  };
  const frame = frames(() => {
    const begin = performance.now();
    draw();
    view.live.dispatchEvent(new CustomEvent("redraw", { detail: { ms: performance.now() - begin } }));
  });
  const settle = debounced(() => {
    history.replaceState(null, "", addressOf(state.choices, state.modelName, state.edited?.cuts ?? null));
    findGoal(state);
    setText(view.result, inWords(state));
    frame.request();
  }, SETTLED_MS);

  function draw() {
    computeWhatChanged(state);
    if (view.picture.clientWidth) drawScene(data, view, state);
  }

  /** Change the choices; a change of scene, cap or model discards moved boundaries. */
  function choose(changed, edited = null) {
    Object.assign(state, { choices: { ...state.choices, ...changed }, edited, chosen: -1 });
    if ("scene" in changed) Object.assign(state, { cursor_ns: null, guess_ns: null });
    frame.request();
    settle();
  }

  /** Called by boundaries.js with the layout after a move. */
  function change({ layout, chosen = state.chosen }) {
    Object.assign(state, { edited: layout, layout, chosen });
    frame.request();
    settle();
  }

  function readAddress() {
    const { choices, cuts, wrong } = choicesOf(location.hash, Object.keys(models));
    const { model, ...others } = choices;
    if (model !== undefined) state.modelName = Object.keys(models)[model];
    choose({ ...others, scene: others.scene ?? state.choices.scene });
    state.seen.add(state.choices.scene);
    const scene = SCENES[state.choices.scene];
    const sequence = scene.plan(models[state.modelName], state.choices.cap).flat();
    const fits = cuts && scene.isEditable && areCuts(cuts, sequence.length);
    if (fits) state.edited = { sequence, cuts, edited: true };
    if (cuts && !fits) wrong.push("cuts");
    setText(view.error, wrong.length ? `address: expected values that the page has, got others for ${wrong.join(", ")}` : "");
  }

  async function open(file) {
    setText(view.error, "");
    setText(view.opened, `Reading ${file.name}…`);
    try {
      const model = await modelInFile(file, data.gpus);
      state.modelName = model.title in state.models ? `${model.title} (${file.name})` : model.title;
      state.models[state.modelName] = model;
      state.goals.clear();
      choose({});
      setText(view.opened, aboutModel(model));
    } catch (error) {
      setText(view.opened, "");
      setText(view.error, error.message);
    }
  }

  const actions = { change, frame, choose, open };
  connectChoices(view, state, actions);
  connectFiles(body, view, actions);
  connectBoundaries(data, view, state, actions);
  connectScrubber(view, state, actions);
  view.see.addEventListener("click", () => {
    Object.assign(state, { guess_ns: state.cursor_ns, cursor_ns: null });
    state.seen.add(state.choices.scene);
    frame.request();
    settle();
  });
  addEventListener("hashchange", () => {
    if (location.hash !== addressOf(state.choices, state.modelName, state.edited?.cuts ?? null)) readAddress();
  });
  readAddress();
  new ResizeObserver(() => frame.request()).observe(view.live);
}

// What is shown

function computeWhatChanged(state) {
  const { choices, models, modelName, edited, drawn } = state;
  const model = models[modelName];
  const scene = SCENES[choices.scene];
  const conditions = conditionsOf(choices, scene);
  if (model !== drawn.model || choices !== drawn.choices) {
    state.layoutAtCap = layoutOf(scene.plan(model, choices.cap));
    state.baseline = baselineOf(model, choices);
  }
  const layout = edited ?? state.layoutAtCap;
  if (model !== drawn.model || choices !== drawn.choices || layout !== drawn.layout) {
    state.answer = replay(model, planOf(layout), conditions);
  }
  state.drawn = { model, choices, layout };
  Object.assign(state, { model, scene, layout, isGuessing: !state.seen.has(choices.scene) });
}

/** Torch's default and the best known layout, for the model and the network of the moment. */
function findGoal(state) {
  if (SCENES[state.choices.scene].id !== "rebuilt") return;
  const key = goalKey(state);
  const { model, choices, answer, layout } = state;
  const conditions = conditionsOf(choices, state.scene);
  if (!state.goals.has(key)) {
    const planned = rebuiltBuckets(model, capsInBytes(TORCHS_DEFAULT));
    state.goals.set(key, { default_ns: replay(model, planned, conditions).iteration_ns, best: bestLayout(model, conditions) });
  }
  const goal = state.goals.get(key);
  if (answer.iteration_ns < goal.best.iteration_ns) goal.best = { iteration_ns: answer.iteration_ns, layout };
}

function goalKey({ choices: { gbit, gpus, factor }, modelName }) {
  return JSON.stringify([modelName, gbit, gpus, factor]);
}

// Elements

function viewOf(data) {
  const view = { controls: {}, buttons: {}, rows: {} };
  view.scenes = data.scenes.map(({ title }) => h("button", { type: "button", class: "scene" }, title));
  view.header = h(
    "header",
    {},
    h("h1", {}, "The Annotated DDP"),
    h("ol", { "aria-label": "Scenes" }, ...view.scenes.map((button) => h("li", {}, button))),
    h("nav", { "aria-label": "More" }, ...links()),
  );
  view.title = h("h2", {});
  view.sentence = h("p", {});
  view.question = h("p", {});
  view.code = h("code", {});
  view.source = h("p", {});
  const words = data.words.flatMap(([word, meaning]) => [h("dt", {}, word), h("dd", {}, meaning)]);
  const notes = data.notes.map((note) => h("p", {}, note));
  view.about = h(
    "section",
    { class: "about", "aria-label": "Code" },
    ...[view.title, view.sentence, view.question, h("pre", {}, view.code), view.source],
    h("dl", {}, ...words),
    ...notes,
  );
  view.error = h("p", { class: "error", role: "alert" });
  view.result = h("p", { class: "result", role: "status", "aria-live": "polite" });
  view.moment = h("p", { class: "moment" });
  view.see = h("button", { type: "button", class: "see" }, "See");
  const picture = pictureOf(view);
  const scrubber = scrubberOf(view);
  scrubber.prepend(view.see);
  view.live = h(
    "main",
    { class: "live ddplab-timeline", "aria-label": "Live timeline" },
    ...[choicesIn(view), partsTable(view), goalOf(view), picture, scrubber, view.moment, legend(), openIn(view)],
    ...[view.error, view.result],
  );
  return view;
}

/** Links to other files: in the repository, or on the site; none from a page that was downloaded alone. */
function links() {
  const isInRepository = /\/figures\/[^/]*$/.test(location.pathname);
  if (!isInRepository && location.protocol === "file:") return [];
  return LINKS.map(([here, site, words]) => h("a", { href: isInRepository ? `../${here}` : site }, words));
}

function choicesIn(view) {
  const range = (name, words, most, least = 0, step = 1) => {
    const input = h("input", { type: "range", min: least, max: most, step });
    input.output = h("b", {});
    view.controls[name] = input;
    return h("label", {}, h("span", {}, words, " ", input.output), input);
  };
  return h(
    "div",
    { class: "controls" },
    range("gbit", "Network", GBIT_PER_S.length - 1),
    range("gpus", "GPUs", WORLD_SIZES.length - 1),
    range("factor", "Straggler", MOST_STRAGGLING, 1, 0.05),
    range("cap", "Cap", CAPS.length - 1),
  );
}

function partsTable(view) {
  const head = ["ms", ...PARTS.map(([, words]) => words)].map((words) => h("th", { scope: "col" }, words));
  const rows = ["now", "baseline", "difference"].map((row) => {
    const name = h("th", { scope: "row" });
    const cells = PARTS.map(([part]) => h("td", { class: part }));
    view.rows[row] = { name, cells };
    return h("tr", { class: row }, name, ...cells);
  });
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}

function goalOf(view) {
  view.goal = h("p", {});
  view.score = h("p", { class: "score" });
  const button = (name, words) => (view.buttons[name] = h("button", { type: "button" }, words));
  const buttons = [button("split", "Split"), button("remove", "Remove"), button("best", "Show best"), button("reset", "Reset")];
  return h("div", { class: "goal" }, view.goal, view.score, ...buttons);
}

function openIn(view) {
  view.models = h("select", { "aria-label": "Model" });
  view.file = h("input", { type: "file", accept: ".json,.gz", "aria-label": "Open a trace" });
  view.opened = h("p", { role: "status" });
  const words = h("p", {}, "or drop a file of torch's profiler, or a trace of ddplab:");
  return h("div", { class: "open" }, view.models, words, view.file, view.opened);
}

// Drawing

function drawScene(data, view, state) {
  const { model, layout, scene, isGuessing } = state;
  const shown = shownOf(model, layout);
  const answer = isGuessing ? computationOf(model, state.choices) : state.answer;
  const width = view.picture.clientWidth;
  const axis = currentAxis(state, width);
  const taken_px = TAKEN_PX.rank * (answer.ranks.length - 1) + TAKEN_PX.goal * Boolean(scene.isEditable);
  const panel_px = (innerWidth > NARROW_PX ? PANEL_PX.wide : PANEL_PX.narrow) - taken_px;
  const geometry = geometryOf(width, answer, axis.end, shown.bytesBefore.at(-1), panel_px);
  Object.assign(state, { shown, answered: shown, axis, geometry });
  state.cursor_ns ??= isGuessing ? state.baseline.iteration_ns : backwardEnd(answer);
  const picture = { geometry, answer, shown, answered: shown, axis, cursor_ns: state.cursor_ns };
  drawPicture(model, view, picture);
  drawBoundaries(view, { geometry, shown: scene.isEditable && !isGuessing ? shown : withoutBoundaries(shown), chosen: state.chosen });
  view.live.classList.toggle("guessing", isGuessing);
  view.live.classList.toggle("locked", !scene.isEditable || isGuessing);
  drawMoment(model, view, picture);
  if (isGuessing) setText(view.moment, `Your guess: ${milliseconds(state.cursor_ns)}. Drag the line to where the iteration ends, then press See.`);
  drawText(data, view, state);
  drawChoices(view, state);
  drawParts(view, state);
  drawGoal(view, state);
}

function withoutBoundaries(shown) {
  return { ...shown, layout: { ...shown.layout, cuts: [] } };
}

/** Before the reader has guessed: computation without communication. */
function computationOf(model, { factor, gpus }) {
  const world_size = WORLD_SIZES[gpus];
  const ranks = distinctRanks(model, world_size, factor).filter((rank, place) => !place || rank.isStraggler);
  return {
    collectives: [],
    exposed: [],
    ranks: ranks.map(({ rank, recorded, factor }) => {
      const { forward_ns, backward_end_ns, ready_ns } = scaledTimes(recorded[0], factor);
      return { rank, ready_ns, spans: [["forward", null, 0, forward_ns], ["backward", null, forward_ns, backward_end_ns]] };
    }),
  };
}

/** The axis ends after both iterations; while the reader drags, it does not become shorter. */
function currentAxis(state, width) {
  const { answer, baseline, isGuessing } = state;
  const longest = isGuessing ? 1.5 * baseline.iteration_ns : answer.iteration_ns;
  state.longest_ns = state.dragging ? Math.max(state.longest_ns, longest) : longest;
  return axisOf(state.longest_ns, Math.max(3, Math.min(12, width / 100)));
}

function drawText(data, view, { choices, isGuessing, guess_ns, answer }) {
  const { title, sentence, question, code, source } = data.scenes[choices.scene];
  setText(view.title, title);
  setText(view.sentence, sentence);
  let asked = isGuessing ? `Guess first. ${question}` : question;
  if (guess_ns !== null && !isGuessing) {
    const off = (100 * (guess_ns - answer.iteration_ns)) / answer.iteration_ns;
    asked = `You guessed ${milliseconds(guess_ns)}; the iteration takes ${milliseconds(answer.iteration_ns)} (${off < 0 ? "−" : "+"}${Math.abs(off).toFixed(0)} %).`;
  }
  setText(view.question, asked);
  setText(view.code, code);
  setText(view.source, source);
  view.scenes.forEach((button, place) => {
    if (place === choices.scene) setAttribute(button, "aria-current", "step");
    else button.removeAttribute("aria-current");
  });
}

function drawChoices(view, { choices, edited, scene, models, modelName, shown, chosen }) {
  const { gbit, gpus, factor, cap } = view.controls;
  setValue(gbit, choices.gbit, `${GBIT_PER_S[choices.gbit]} Gbit/s`);
  setValue(gpus, choices.gpus, `${WORLD_SIZES[choices.gpus]}`);
  setValue(factor, choices.factor, choices.factor > 1 ? `× ${choices.factor}` : "none");
  setValue(cap, choices.cap, edited ? "moved" : scene.isEditable ? capName(choices.cap) : "no buckets");
  cap.disabled = !scene.isEditable;
  matchCount(view.models, Object.keys(models).length, () => h("option", {}));
  Object.keys(models).forEach((name, place) => setText(view.models.children[place], name));
  if (view.models.value !== modelName) view.models.value = modelName;
  view.buttons.split.disabled = withLargestSplit(shown.layout, shown.bytesBefore).boundary < 0;
  view.buttons.remove.disabled = chosen < 0;
  view.buttons.reset.disabled = !edited;
}

function drawParts(view, { answer, baseline, choices, isGuessing }) {
  const before = SCENES[choices.scene - 1]?.id ?? "alone";
  const now = roundedParts(answer);
  const then = roundedParts(baseline);
  setText(view.rows.now.name, SCENES[choices.scene].id);
  setText(view.rows.baseline.name, before);
  setText(view.rows.difference.name, "change");
  PARTS.forEach(([part], column) => {
    const changed = now[part] - then[part];
    setText(view.rows.now.cells[column], isGuessing ? "?" : (now[part] / 1e6).toFixed(1));
    setText(view.rows.baseline.cells[column], (then[part] / 1e6).toFixed(1));
    const sign = changed < 0 ? "−" : "+";
    setText(view.rows.difference.cells[column], isGuessing ? "" : changed ? `${sign}${Math.abs(changed / 1e6).toFixed(1)}` : "0");
    view.rows.difference.cells[column].classList.toggle("worse", changed > 0 && !isGuessing);
  });
}

function drawGoal(view, state) {
  const goal = state.scene.id === "rebuilt" ? state.goals.get(goalKey(state)) : null;
  setText(view.goal, "");
  setText(view.score, "");
  view.buttons.best.disabled = !goal;
  if (!goal) return;
  const { iteration_ns } = state.answer;
  const [standard, best] = [goal.default_ns, goal.best.iteration_ns].map(milliseconds);
  setText(view.goal, `Beat torch's default cap, ${standard}. Best known: ${best}.`);
  setText(view.score, `Score ${scoreOf(iteration_ns, goal.default_ns, goal.best.iteration_ns)}`);
}

/** The result for readers who hear the page. */
function inWords({ answer, baseline, choices, isGuessing }) {
  if (isGuessing) return "";
  const changed = milliseconds(Math.abs(answer.iteration_ns - baseline.iteration_ns));
  const direction = answer.iteration_ns < baseline.iteration_ns ? "less" : "more";
  const before = SCENES[choices.scene - 1]?.id ?? "computation alone";
  return `Iteration ${milliseconds(answer.iteration_ns)}, ${changed} ${direction} than ${before}; exposed communication ${milliseconds(answer.exposed_ns)}.`;
}

function aboutModel({ title, device, names, sizes_bytes, ranks }) {
  const count = ranks.reduce((total, iterations) => total + iterations.length, 0);
  return `${title} on ${device}: ${names.length} gradients, ${megabytes(sum(sizes_bytes))}, ${count} iterations of ${ranks.length} rank${ranks.length > 1 ? "s" : ""}.`;
}

// What the reader does

function connectChoices(view, state, { choose, change }) {
  view.scenes.forEach((button, scene) => button.addEventListener("click", () => choose({ scene })));
  for (const [name, input] of Object.entries(view.controls)) {
    const keepsBoundaries = name !== "cap";
    input.addEventListener("input", () => choose({ [name]: Number(input.value) }, keepsBoundaries ? state.edited : null));
  }
  view.models.addEventListener("change", () => {
    state.modelName = view.models.value;
    choose({});
  });
  const { split, remove, best, reset } = view.buttons;
  split.addEventListener("click", () => {
    const { layout, boundary } = withLargestSplit(state.layout, state.shown.bytesBefore);
    if (boundary >= 0) change({ layout, chosen: boundary });
  });
  remove.addEventListener("click", () => removeBoundary(state, change));
  best.addEventListener("click", () => change({ layout: state.goals.get(goalKey(state)).best.layout, chosen: -1 }));
  reset.addEventListener("click", () => choose({}));
}

function connectFiles(body, view, { open }) {
  view.file.addEventListener("change", () => view.file.files.length && open(view.file.files[0]));
  const isFile = ({ dataTransfer }) => dataTransfer.types.includes("Files");
  for (const [name, drops] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
    body.addEventListener(name, (event) => {
      if (!isFile(event)) return;
      event.preventDefault(); // the browser would open the file itself
      body.classList.toggle("dropping", drops);
      if (name === "drop") open(event.dataTransfer.files[0]);
    });
  }
}
