// The page: scenes, guesses, the goal, and dropped files around the live timeline.

function openPage(body, data) {
  const { scenes, caps } = data;
  const models = data.models.map((trace) => ({ ...modelOfTrace(trace, data.gpus), processor: FREE }));
  const values = {
    scene: scenes.map(({ id }) => id),
    model: models.map(({ title }) => title),
    gbit: data.gbit_per_s,
    gpus: data.world_sizes,
    cap: caps.map(({ id }) => id),
  };
  const view = namedElements(body);
  const [seen, goals] = [new Set([0]), new Map()];
  let [done, verdict] = [{}, null];
  const layoutAt = ({ scene, model, cap }) => layoutOfScene(scenes[scene], models[model], caps[cap].bytes);
  const conditionsOf = ({ scene, gbit, gpus, factor }) => {
    return { ...scenes[scene], gbit_per_s: values.gbit[gbit], world_size: values.gpus[gpus], factor };
  };
  const timeline = openTimeline(view.live, {
    scenes: scenes.map(({ title }) => title),
    ...{ ...data.words, most_straggling: data.most_straggling, start: data.start },
    dataOf: ({ model }) => models[model],
    layoutAt,
    update,
    namesOf: ({ choices, baselineName }) => [scenes[choices.scene].id, baselineName],
    noteOn,
    settled: (state) => {
      history.replaceState(null, "", addressOf(state.choices, values, state.layout));
      findGoal(state);
    },
  });
  const { state, choose } = timeline;

  /** Replay what has changed. Until the reader has guessed, the answer is computation alone. */
  function update(state) {
    const { choices, layout } = state;
    const isGuessing = !seen.has(choices.scene);
    if (choices === done.choices && layout === done.layout && isGuessing === state.isGuessing) return;
    const model = models[choices.model];
    const conditions = conditionsOf(choices);
    const answer = isGuessing ? computationOf(model, conditions) : replay(model, planOf(layout), conditions);
    if (choices !== done.choices || layout.edited !== done.layout.edited) {
      const other = layout.edited ? choices.scene : choices.scene - 1;
      const scene = { ...choices, scene: Math.max(0, other) };
      const { compute_ns, ...before } = replay(model, planOf(layoutAt(scene)), conditionsOf(scene));
      const alone = { iteration_ns: compute_ns, parts: { computation_ns: compute_ns } };
      state.baseline = other < 0 ? alone : before;
      state.baselineName = other < 0 ? "alone" : layout.edited ? caps[choices.cap].name : scenes[other].id;
    }
    if (choices.scene !== done.choices?.scene) state.cursor_ns = null;
    if (isGuessing === state.isGuessing) verdict = null;
    done = { choices, layout };
    Object.assign(state, { answer, isGuessing, answered: shownOf(model, layout) });
    drawScene(state);
  }

  function noteOn({ choices, isGuessing, chosen }) {
    const { question } = scenes[choices.scene];
    if (isGuessing) return `Guess first. ${question} Drag the line there, then press See.`;
    return verdict ?? (chosen < 0 ? question : null);
  }

  function see() {
    const guess_ns = state.cursor_ns;
    seen.add(state.choices.scene);
    state.cursor_ns = null;
    timeline.redraw();
    const { iteration_ns } = state.answer;
    const off = Math.round((100 * (guess_ns - iteration_ns)) / iteration_ns);
    const guessed = guess_ns === null ? "No guess" : `You guessed ${milliseconds(guess_ns)} (${off < 0 ? "−" : "+"}${Math.abs(off)} %)`;
    verdict = `${guessed}; the iteration takes ${milliseconds(iteration_ns)}.`;
    timeline.change({});
  }

  function drawScene({ choices }) {
    [...view.stories.children].forEach((story, place) => (story.hidden = place !== choices.scene));
    matchCount(view.models, values.model.length, () => h("option", {}));
    values.model.forEach((name, place) => setText(view.models.children[place], name));
    view.models.selectedIndex = choices.model;
    drawGoal();
  }

  /** torch's default and the best known layout, for the scene, the model and the network of the moment. */
  function findGoal({ choices, layout, answer, isGuessing }) {
    if (layout.noun !== "bucket" || isGuessing) return;
    const [model, conditions, key] = [models[choices.model], conditionsOf(choices), goalKey()];
    if (!goals.has(key)) {
      const layouts = caps.map((_, cap) => layoutAt({ ...choices, cap }));
      const { iteration_ns } = replay(model, planOf(layouts[data.start.cap]), conditions);
      goals.set(key, { default_ns: iteration_ns, best: bestLayout(model, layouts, conditions) });
    }
    const goal = goals.get(key);
    if (answer.iteration_ns < goal.best.iteration_ns) goal.best = { iteration_ns: answer.iteration_ns, layout };
    drawGoal();
  }

  const goalKey = () => JSON.stringify({ ...state.choices, cap: null });

  function drawGoal() {
    const goal = goals.get(goalKey());
    view.best.disabled = !goal;
    const [standard, best] = goal ? [goal.default_ns, goal.best.iteration_ns] : [];
    setText(view.goal, goal ? `Beat torch's default cap, ${milliseconds(standard)}. Best known: ${milliseconds(best)}.` : "");
    setText(view.score, goal ? `Score ${scoreOf(state.answer.iteration_ns, standard, best)}` : "");
  }

  // The address, and files

  function readAddress(hash) {
    const { choices, cuts, wrong } = choicesOf(hash, values, data.most_straggling);
    choose({ scene: state.choices.scene, ...choices });
    seen.add(state.choices.scene);
    const { sequence, noun } = state.layout;
    const fits = cuts && noun === "bucket" && areCuts(cuts, sequence.length);
    if (fits) timeline.change({ layout: { ...state.layout, cuts, edited: true } });
    if (cuts && !fits) wrong.push("cuts");
    view.forecast.close();
    complain(wrong.length ? `address: expected values that the page has, got others for ${wrong.join(", ")}` : "");
  }

  /** Show an error, at the place on the screen where the reader has dropped a file. */
  function complain(words, { clientX = 0, clientY = 0 } = {}) {
    setText(view.fileError, words);
    const [left, top] = [Math.min(clientX, innerWidth - 340), Math.min(clientY, innerHeight - 140)];
    view.fileError.style = `left: ${Math.max(8, left)}px; top: ${Math.max(44, top)}px`;
  }

  view.fileError.addEventListener("click", () => complain("")); // it may cover a control

  async function open(file, place) {
    complain(`Reading ${file.name}…`, place);
    try {
      const model = await modelInFile(file, data.gpus);
      const name = data.models.some(({ workload }) => workload.model === model.title) ? file.name : model.title;
      const known = values.model.indexOf(name);
      const number = known < 0 ? models.length : known;
      [models[number], values.model[number]] = [model, name];
      goals.clear();
      choose({ model: number });
      showForecast();
      complain("");
    } catch (error) {
      complain(error.message, place);
    }
  }

  function showForecast() {
    const { model } = state.choices;
    const scene = scenes.length - 1;
    const forecast = forecastOf(models[model], caps.map(({ bytes }) => bytes), scenes[scene]);
    const addressAt = (row) => {
      const places = { gbit: values.gbit.indexOf(row.gbit_per_s), gpus: values.gpus.indexOf(row.world_size), cap: row.cap };
      return addressOf({ ...state.choices, scene, factor: 1, ...places }, values, {});
    };
    drawForecast(view, models[model], forecast, { caps, costs: data.gpus.memory, addressAt });
    if (!view.forecast.open) view.forecast.showModal();
  }

  view.best.hidden = false;
  view.best.addEventListener("click", () => timeline.change({ layout: goals.get(goalKey()).best.layout, chosen: -1 }));
  view.see.addEventListener("click", see);
  view.models.addEventListener("change", () => choose({ model: view.models.selectedIndex }));
  view.showForecast.addEventListener("click", showForecast);
  view.file.addEventListener("change", () => {
    const { left: clientX, bottom: clientY } = view.file.getBoundingClientRect();
    if (view.file.files.length) open(view.file.files[0], { clientX, clientY });
  });
  for (const [name, drops] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
    body.addEventListener(name, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // the browser would open the file itself
      body.classList.toggle("dropping", drops);
      if (name === "drop") open(event.dataTransfer.files[0], event);
    });
  }
  addEventListener("hashchange", ({ newURL }) => {
    const { hash } = new URL(newURL); // not that of `location`: the state before may have settled since
    if (hash !== addressOf(state.choices, values, state.layout)) readAddress(hash);
    view.forecast.close();
  });
  const isInRepository = /\/figures\/[^/]*$/.test(location.pathname);
  view.links.hidden = !isInRepository && location.protocol === "file:"; // the page alone was downloaded
  if (!isInRepository) for (const link of view.links.children) link.href = link.dataset.site;
  readAddress(location.hash);
}

/**
 * Before the reader has guessed: computation without communication. The iteration is one that none can exceed: the
 * longest computation, and all parts of one all-reduce for each gradient in turn. It does not depend on the scene.
 */
function computationOf(model, conditions) {
  const { world_size, factor } = conditions;
  const each = [...model.names.keys()].map((index) => [index]);
  const { parts, ranks } = replay(model, each, { ...conditions, overlaps: false, copiesOut: true });
  const distinct = distinctRanks(model, world_size, factor);
  const every = distinct.flatMap(({ recorded, factor }) => recorded.map((times) => scaledTimes(times, factor)));
  const most = (part) => every.reduce((longest, times) => Math.max(longest, times[part]), 0);
  const computes = ([kind]) => kind === "forward" || kind === "backward";
  return {
    iteration_ns: most("backward_end_ns") + most("step_ns") + parts.copies_ns + parts.launches_ns + parts.exposed_ns,
    ...{ parts: {}, collectives: [], exposed: [] },
    ranks: ranks.map((rank) => ({ ...rank, spans: rank.spans.filter(computes) })),
  };
}

/** Points from 0, as torch's default cap, to 100, as the best known layout. */
function scoreOf(iteration_ns, default_ns, best_ns) {
  const points = Math.max(0, Math.floor((100 * (default_ns - iteration_ns)) / (default_ns - best_ns)));
  return iteration_ns <= best_ns ? 100 : points;
}
