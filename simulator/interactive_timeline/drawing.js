// Drawing: writes the current state into the widget's elements.

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
    const words = `after ${cut} of ${sequence.length} gradients; ${bytesAround(shown, boundary)}`;
    setAttribute(element, "aria-valuetext", words);
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
  const much = `${milliseconds(Math.abs(difference))} ${difference < 0 ? "faster" : "slower"} than`;
  const comparison = `${signed(difference) === "0" ? "as" : much} with the start layout`;
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
  const ofBuckets = answer.collectives.filter(([bucket]) => bucket !== null); // the others broadcast buffers
  const sending = ofBuckets.filter(([, , start, done]) => start <= now && now < done);
  const waiting = ofBuckets.filter(([bucket, , start]) => {
    if (start <= now) return false;
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
