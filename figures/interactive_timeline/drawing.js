// Drawing of the picture: its paths and labels, the boundaries, and the moment in words.

const SVG = "http://www.w3.org/2000/svg";

function drawPicture(view, { geometry, answer, shown, answered, axis }, cursor_ns) {
  const { width, height } = geometry;
  setAttributes(view.svg, { viewBox: `0 0 ${width} ${height}`, height });
  const { paths, labels } = shapesOf(geometry, answer, shown, answered, axis);
  paths.cursor = `M${r(geometry.x(cursor_ns))} 4V${geometry.axis + 5}`;
  for (const path of view.svg.querySelectorAll("path")) setAttributes(path, { d: paths[path.getAttribute("class")] ?? "" });
  matchCount(view.labels, labels.length, () => document.createElementNS(SVG, "text"));
  labels.forEach(([name, x, y, words, anchor], number) => {
    const text = view.labels.children[number];
    setAttributes(text, { class: name, x: r(x), y: r(y), "text-anchor": anchor });
    setText(text, words);
  });
}

/** The boundaries of the shown layout; none while they are locked. */
function drawBoundaries(view, { geometry, shown, chosen }, isLocked) {
  const { sequence } = shown.layout;
  const cuts = isLocked ? [] : shown.layout.cuts;
  matchCount(view.boundaries, cuts.length, createBoundary);
  cuts.forEach((cut, boundary) => {
    const element = view.boundaries.children[boundary];
    const y = r(geometry.y(shown.bytesBefore[cut]));
    const width = r(geometry.right - geometry.left + 24);
    element.classList.toggle("chosen", boundary === chosen);
    const [low, high] = limitsOf(shown.layout, boundary);
    setAttributes(element, {
      style: `left: ${geometry.left - 24}px; width: ${width}px; transform: translateY(${y}px)`,
      "aria-label": `Boundary between bucket ${boundary} and bucket ${boundary + 1}`,
      ...{ "aria-valuemin": low, "aria-valuemax": high, "aria-valuenow": cut },
      "aria-valuetext": `after ${cut} of ${sequence.length} gradients; ${bytesAround(shown, boundary)}`,
    });
  });
}

function createBoundary() {
  const attributes = { class: "boundary", role: "slider", tabindex: 0, "aria-orientation": "vertical" };
  return h("div", attributes, h("span", { class: "knob" }));
}

/** The bytes of the two buckets beside a boundary, in words. */
function bytesAround({ edges_bytes }, boundary) {
  const bytes = (bucket) => megabytes(edges_bytes[bucket + 1] - edges_bytes[bucket]);
  return `bucket ${boundary} has ${bytes(boundary)}, bucket ${boundary + 1} has ${bytes(boundary + 1)}`;
}

function drawMoment(view, { answer, answered, axis, geometry, isGuessing }, cursor_ns, sizes_bytes) {
  const guess = isGuessing && `Your guess: ${milliseconds(cursor_ns)}.`;
  const words = guess || momentInWords(answer, answered, cursor_ns, sizes_bytes);
  setText(view.moment, words);
  const style = `margin-left: ${geometry.left - 8}px; width: ${r(geometry.right - geometry.left + 16)}px`;
  setAttributes(view.scrubber, { max: axis.end, style, "aria-valuetext": words });
  setValue(view.scrubber, Math.round(cursor_ns / 1e5) * 1e5);
}

/** The state of the iteration at a moment. */
function momentInWords(answer, answered, now, sizes) {
  const { ready_ns } = answer.ranks[0];
  const readyBytes = sizes.reduce((bytes, size, index) => bytes + (ready_ns[index] <= now ? size : 0), 0);
  const ofBuckets = answer.collectives.filter(([bucket]) => bucket !== null); // the others broadcast buffers
  const sending = ofBuckets.filter(([, , start, done]) => start <= now && now < done);
  const isFull = (bucket) => fillingTimes(answer, answered.buckets[bucket])[1] <= now;
  const waiting = ofBuckets.filter(([bucket, , start]) => now < start && isFull(bucket));
  const exposed = answer.exposed.reduce((ns, [start, end]) => ns + Math.max(0, Math.min(now, end) - start), 0);
  const names = (collectives) => namesOf(collectives, answered.layout.noun);
  const total = sizes.reduce((bytes, size) => bytes + size, 0);
  return (
    `At ${milliseconds(now)}: ${(readyBytes / 1e6).toFixed(1)} of ${megabytes(total)} are ready; ` +
    `on the network: ${names(sending)}; full and waiting: ${names(waiting)}; ` +
    `exposed so far: ${milliseconds(exposed)}.`
  );
}

function namesOf(collectives, noun) {
  const numbers = collectives.map(([bucket]) => bucket);
  if (!numbers.length) return "nothing";
  if (numbers.length < 3) return `${noun}${numbers.length > 1 ? "s" : ""} ${numbers.join(" and ")}`;
  return `${numbers.length} ${noun}s, ${numbers[0]} to ${numbers.at(-1)}`;
}

function backwardEnd(answer) {
  return Math.max(...answer.ranks[0].spans.filter(([kind]) => kind === "backward").map(([, , , end]) => end));
}
