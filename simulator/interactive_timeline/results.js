// Drawing of the widget: the current state in its picture, controls and table of results.

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

function aboutChosen(data, { chosen, shown }) {
  const { cuts, sequence } = shown.layout;
  if (chosen < 0) return "Drag a boundary, or choose one with Tab and move it with the arrow keys.";
  const before = data.names[sequence[cuts[chosen] - 1]];
  const after = data.names[sequence[cuts[chosen]]];
  return `Chosen boundary: between ${before} and ${after}; ${bytesAround(shown, chosen)}.`;
}

function drawResult(view, { answer, startAnswer }) {
  const [shown, before] = [roundedParts(answer), roundedParts(startAnswer)];
  for (const [name, , always] of ROWS) {
    const [now, start, difference] = view.cells[name];
    const changed_ns = shown[name] - before[name];
    setText(now, milliseconds(shown[name]));
    setText(start, milliseconds(before[name]));
    setText(difference, signed(changed_ns));
    difference.classList.toggle("worse", changed_ns > 0);
    now.parentElement.hidden = !always && !shown[name] && !before[name];
  }
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
