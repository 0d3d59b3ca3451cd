// The picture's elements, and their drawing: lanes, buckets, boundaries, and the moment in words.

const PATHS = [
  "stripe", "filling", "queued", "hidden", "exposed", "edge", "idle", "waiting", "forward", "backward", "copy",
  "late", "gradient", "curve", "axis", "cursor",
]; // later ones are drawn over earlier ones
const LEGEND = [
  ["forward", "forward pass, optimiser step"],
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

function pictureOf(view) {
  view.svg = svg("svg", { "aria-hidden": "true", focusable: "false" });
  view.boundaries = h("div", { class: "boundaries", role: "group", "aria-label": "Bucket boundaries" });
  view.picture = h("div", { class: "picture" }, view.svg, view.boundaries);
  view.paths = Object.fromEntries(PATHS.map((name) => [name, svg("path", { class: name })]));
  view.labels = svg("g", {});
  view.svg.append(...Object.values(view.paths), view.labels);
  return view.picture;
}

function scrubberOf(view) {
  const name = { "aria-label": "Moment in the iteration" };
  view.scrubber = h("input", { type: "range", min: 0, step: 100000, ...name, ...OWN_KEYS });
  view.play = h("button", { type: "button", class: "play", ...OWN_KEYS }, "Play");
  return h("div", { class: "scrubber" }, view.play, view.scrubber);
}

function legend() {
  const entry = ([name, words]) => {
    const lines = { gradient: "M7 2v10", late: "M7 2v10", curve: "M1 11h5v-8h7", queued: "M1 7h13" };
    const drawing = lines[name] ?? "M1 2h13v10h-13z";
    const sample = svg("svg", { width: 15, height: 14, "aria-hidden": "true" });
    sample.append(svg("path", { class: name, d: drawing }));
    return h("li", {}, sample, words);
  };
  return h("ul", { class: "legend" }, ...LEGEND.map(entry));
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
