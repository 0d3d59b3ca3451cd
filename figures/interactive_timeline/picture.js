// The picture: SVG paths and labels of one iteration, computed from a layout and an answer. All shapes of one kind
// are one path, so that a redraw sets about twenty attributes, however many buckets there are.

const LANE = 26;
const COPIES = 14;
const GAP = 10;
const PANEL = { wide: 205, narrow: 150 };
const AXIS = 34;
const LEAST_NAMED = 14;
const LEAST_NUMBERED = 20;
const LEAST_EDGED = 8; // a narrower bar would lose too much of its width to its edge

/** Positions in pixels: of the lanes for the answer's ranks, and of times and bytes. */
function geometryOf(width, answer, axisEnd_ns, totalBytes) {
  const narrow = width < 560;
  const panelHeight = (narrow ? PANEL.narrow : PANEL.wide) - (answer.ranks.length - 1) * (LANE + GAP);
  const left = narrow ? 84 : 150;
  const right = width - 14;
  const lanes = answer.ranks.map((_, row) => GAP + row * (LANE + GAP));
  const copies = lanes.at(-1) + LANE + GAP;
  const panel = copies + COPIES + GAP;
  const network = panel + panelHeight + GAP;
  const axis = network + LANE;
  return {
    narrow, left, right, lanes, copies, panel, network, axis, width,
    height: axis + AXIS,
    panelBottom: panel + panelHeight,
    x: (ns) => left + ((right - left) * ns) / axisEnd_ns,
    y: (bytes) => panel + panelHeight - (panelHeight * bytes) / totalBytes,
  };
}

/** End of the time axis and distance of its ticks, in nanoseconds; the end is a multiple of the distance. */
function axisOf(longest_ns, ticks) {
  const rough = Math.max(1, longest_ns) / ticks;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((distance) => distance >= rough);
  return { step, end: Math.ceil(longest_ns / step) * step };
}

const LANE_OF = { forward: "forward", backward: "backward", step: "forward", launch: "copy" };

/**
 * Paths of all lanes, by class, and labels as `[class, x, y, words, anchor]`. `shown` is the layout on the screen; the
 * answer belongs to `answered`.
 */
function shapesOf(geometry, answer, shown, answered, axis) {
  const [paths, labels] = [{}, []];
  const add = (name, path) => (paths[name] = (paths[name] ?? "") + path);
  const label = (...words) => labels.push(words);
  answer.ranks.forEach((rank, row) => addComputation(add, geometry, answer, rank, row));
  addBands(add, label, geometry, answer, shown, answered);
  addNetwork(add, label, geometry, answer);
  addGradients(add, geometry, answer, shown);
  addAxis(add, label, geometry, axis);
  nameLanes(label, geometry, answer);
  return { paths, labels };
}

function addComputation(add, geometry, answer, rank, row) {
  const top = geometry.lanes[row];
  for (const [kind, , start, end] of rank.spans) {
    const copies = kind === "pack" || kind === "copy_out" || kind === "launch";
    if (kind === "wait") {
      add("idle", box(geometry, start, end, top, LANE));
      for (const [low, high] of clipped(answer.collectives.map(([, , ...moments]) => moments), start, end)) {
        add("waiting", box(geometry, low, high, top, LANE));
      }
    } else if (!copies) {
      add(LANE_OF[kind] ?? "backward", box(geometry, start, end, top, LANE));
    } else if (row === 0) {
      add("copy", box(geometry, start, end, geometry.copies, COPIES, 1));
    }
  }
}

/** The parts of these intervals, in order of time, that lie between two moments. */
function clipped(intervals, begin, end) {
  const parts = intervals.map(([start, done]) => [Math.max(start, begin), Math.min(done, end)]);
  return parts.filter(([low, high]) => low < high);
}

/** One band for each bucket: from its first gradient to its last, then its wait, then its all-reduce. */
function addBands(add, label, geometry, answer, shown, answered) {
  shown.buckets.forEach((members, bucket) => {
    const [top, height] = band(geometry, shown, bucket);
    const [first, full] = fillingTimes(answer, members);
    add("filling", box(geometry, first, full, top, height));
    const bytes = shown.edges_bytes[bucket + 1] - shown.edges_bytes[bucket];
    const words = geometry.narrow ? `${bucket}` : `${shown.layout.noun} ${bucket}: ${megabytes(bytes)}`;
    if (height >= LEAST_NAMED) label("lane", 0, top + height / 2 + 4.5, words, "start");
    if (bucket % 2) add("stripe", `M${geometry.left} ${r(top)}H${geometry.right}v${r(height)}H${geometry.left}z`);
  });
  for (const [bucket, , start, done] of answer.collectives) {
    if (bucket === null) continue; // it broadcasts a buffer
    const [top, height] = band(geometry, answered, bucket);
    const middle = top + height / 2;
    const full = fillingTimes(answer, answered.buckets[bucket])[1];
    if (start > full) add("queued", `M${r(geometry.x(full))} ${r(middle)}H${r(geometry.x(start))}`);
    addSending(add, geometry, answer, start, done, top, height);
  }
}

function band(geometry, { edges_bytes }, bucket) {
  const top = geometry.y(edges_bytes[bucket + 1]);
  return [top, geometry.y(edges_bytes[bucket]) - top];
}

/** When the first gradient of a bucket is ready, and when the last one is ready on all ranks shown. */
function fillingTimes(answer, members) {
  let first = Infinity;
  let full = 0;
  for (const { ready_ns } of answer.ranks) {
    for (const index of members) {
      first = Math.min(first, ready_ns[index]);
      full = Math.max(full, ready_ns[index]);
    }
  }
  return [first, full];
}

/** An all-reduce, at least a pixel wide: hidden behind computation, and exposed where the slowest rank waits. */
function addSending(add, geometry, answer, start, done, top, height) {
  add("hidden", box(geometry, start, done, top, height, 1));
  for (const [low, high] of clipped(answer.exposed, start, done)) add("exposed", box(geometry, low, high, top, height, 1));
}

function addNetwork(add, label, geometry, answer) {
  const { slots, slotOf } = slotsOf(answer.collectives);
  const height = LANE / slots;
  answer.collectives.forEach(([bucket, , start, done], number) => {
    const top = geometry.network + slotOf[number] * height;
    const [left, right] = [start, done].map(geometry.x);
    addSending(add, geometry, answer, start, done, top, height);
    if (right - left >= LEAST_EDGED) add("edge", `M${r(left)} ${r(top)}v${r(height)}`);
    if (bucket === null || right - left < LEAST_NUMBERED) return;
    label("number", (left + right) / 2, top + height / 2 + 4.5, `${bucket}`, "middle");
  });
}

/** Which of the simultaneous collectives each one is, so that none covers another. */
function slotsOf(collectives) {
  const free = [];
  const slotOf = collectives.map(([, , start, done]) => {
    let slot = free.findIndex((moment) => moment <= start);
    if (slot < 0) slot = free.length;
    free[slot] = done;
    return slot;
  });
  return { slots: Math.max(1, free.length), slotOf };
}

/** Each gradient as an upright stroke at its place in the buckets. */
function addGradients(add, geometry, answer, { layout, bytesBefore }) {
  answer.ranks.forEach(({ ready_ns }, row) => {
    layout.sequence.forEach((index, place) => {
      const height = Math.max(1, geometry.y(bytesBefore[place]) - geometry.y(bytesBefore[place + 1]));
      const x = r(geometry.x(ready_ns[index]));
      add(row ? "late" : "gradient", `M${x} ${r(geometry.y(bytesBefore[place]))}v${r(-height)}`);
    });
  });
}

/** Parameter indices in ready order; of simultaneous gradients, lower indices first. */
function inReadyOrder(ready_ns) {
  return ready_ns.map((_, index) => index).sort((a, b) => ready_ns[a] - ready_ns[b] || a - b);
}

function nameLanes(label, geometry, answer) {
  const { narrow } = geometry;
  answer.ranks.forEach(({ rank }, row) => {
    const one = narrow ? "compute" : "computation";
    const name = answer.ranks.length === 1 ? one : `rank ${rank}${row && !narrow ? ", slow" : ""}`;
    label("lane", 0, geometry.lanes[row] + 18, name, "start");
  });
  label("lane", 0, geometry.copies + 12, "copies", "start");
  label("lane", 0, geometry.network + 18, "network", "start");
}

function addAxis(add, label, geometry, { step, end }) {
  add("axis", `M${geometry.left} ${geometry.axis}H${geometry.right}`);
  for (let ns = 0; ns <= end; ns += step) {
    const [x, last] = [geometry.x(ns), ns + step > end];
    add("axis", `M${r(x)} ${geometry.axis}v5`);
    label("tick", x, geometry.axis + 20, `${ns / 1e6}${last ? " ms" : ""}`, last ? "end" : "middle");
  }
}

/** A rectangle from one time to another as a path, at least `least` pixels wide. */
function box(geometry, start, end, top, height, least = 0) {
  const left = geometry.x(start);
  const width = Math.max(least, geometry.x(end) - left);
  return `M${r(left)} ${r(top)}h${r(width)}v${r(height)}h${r(-width)}z`;
}

const r = (pixels) => Math.round(pixels * 10) / 10;
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
const milliseconds = (ns) => `${(ns / 1e6).toFixed(1)} ms`;

/**
 * The iteration and its parts, each rounded to a tenth of a millisecond, so that the rounded parts add up to the
 * rounded iteration; the first part is rounded alone, the others by less than a tenth.
 */
function roundedParts({ iteration_ns, parts }) {
  const round = (ns) => 1e5 * Math.round(ns / 1e5);
  const rounded = { iteration_ns: round(iteration_ns) };
  let before_ns = 0;
  for (const [part, ns] of Object.entries(parts)) {
    rounded[part] = round(before_ns + ns) - round(before_ns);
    before_ns += ns;
  }
  return rounded;
}
