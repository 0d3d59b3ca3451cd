// The picture: SVG paths and labels of one iteration, computed from a layout and an answer. All shapes of one kind
// are one path, so that a redraw sets about twenty attributes, however many buckets there are.

const LANE = 26;
const COPIES = 14;
const GAP = 10;
const PANEL = { wide: 205, narrow: 150 };
const AXIS = 34;
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

/** Paths of all lanes, by class. `shown` is the layout on the screen; the answer belongs to `answered`. */
function pathsOf(geometry, answer, shown, answered) {
  const paths = {};
  const add = (name, path) => (paths[name] = (paths[name] ?? "") + path);
  answer.ranks.forEach((rank, row) => addComputation(add, geometry, answer, rank, row));
  addBands(add, geometry, answer, shown, answered);
  addNetwork(add, geometry, answer);
  addGradients(add, geometry, answer, shown);
  return paths;
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
function addBands(add, geometry, answer, shown, answered) {
  shown.ends.forEach((end, bucket) => {
    const [top, height] = band(geometry, shown, bucket);
    const members = shown.layout.sequence.slice(shown.ends[bucket - 1] ?? 0, end);
    const [first, full] = fillingTimes(answer, members);
    add("filling", box(geometry, first, full, top, height));
    if (bucket % 2) add("stripe", `M${geometry.left} ${r(top)}H${geometry.right}v${r(height)}H${geometry.left}z`);
  });
  for (const [bucket, , start, done] of answer.collectives) {
    if (bucket === null || bucket >= answered.ends.length) continue;
    const [top, height] = band(geometry, answered, bucket);
    const members = answered.layout.sequence.slice(answered.ends[bucket - 1] ?? 0, answered.ends[bucket]);
    const middle = top + height / 2;
    const full = fillingTimes(answer, members)[1];
    if (start > full) add("queued", `M${r(geometry.x(full))} ${r(middle)}H${r(geometry.x(start))}`);
    addSending(add, geometry, answer, start, done, top, height);
  }
}

function band(geometry, { bytesBefore, ends }, bucket) {
  const top = geometry.y(bytesBefore[ends[bucket]]);
  return [top, geometry.y(bytesBefore[ends[bucket - 1] ?? 0]) - top];
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

function addNetwork(add, geometry, answer) {
  const { slots, slotOf } = slotsOf(answer.collectives);
  const height = LANE / slots;
  answer.collectives.forEach(([, , start, done], number) => {
    const top = geometry.network + slotOf[number] * height;
    addSending(add, geometry, answer, start, done, top, height);
    if (geometry.x(done) - geometry.x(start) < LEAST_EDGED) return;
    add("edge", `M${r(geometry.x(start))} ${r(top)}v${r(height)}`);
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

/** Labels as `[class, x, y, words, anchor]`. */
function labelsOf(geometry, answer, shown, axis) {
  return [
    ...laneLabels(geometry, answer),
    ...bucketLabels(geometry, shown),
    ...networkLabels(geometry, answer),
    ...axisLabels(geometry, axis),
  ];
}

function laneLabels(geometry, answer) {
  const { narrow } = geometry;
  const names = answer.ranks.map(({ rank }, row) => {
    if (answer.ranks.length === 1) return narrow ? "compute" : "computation";
    return `rank ${rank}${row && !narrow ? ", slow" : ""}`;
  });
  const lanes = names.map((name, row) => ["lane", 0, geometry.lanes[row] + 18, name, "start"]);
  lanes.push(["lane", 0, geometry.copies + 12, "copies", "start"]);
  lanes.push(["lane", 0, geometry.network + 18, "network", "start"]);
  return lanes;
}

function bucketLabels(geometry, shown) {
  const labels = [];
  shown.ends.forEach((end, bucket) => {
    const [top, height] = band(geometry, shown, bucket);
    if (height < 14) return;
    const bytes = shown.bytesBefore[end] - shown.bytesBefore[shown.ends[bucket - 1] ?? 0];
    const words = geometry.narrow ? `${bucket}` : `${shown.layout.noun} ${bucket}: ${megabytes(bytes)}`;
    labels.push(["lane", 0, top + height / 2 + 4.5, words, "start"]);
  });
  return labels;
}

function networkLabels(geometry, answer) {
  const labels = [];
  const { slots, slotOf } = slotsOf(answer.collectives);
  answer.collectives.forEach(([bucket, , start, done], number) => {
    if (bucket === null || geometry.x(done) - geometry.x(start) < 20) return;
    const middle = (geometry.x(start) + geometry.x(done)) / 2;
    const y = geometry.network + ((slotOf[number] + 0.5) * LANE) / slots + 4.5;
    labels.push(["number", middle, y, `${bucket}`, "middle"]);
  });
  return labels;
}

function axisLabels(geometry, { step, end }) {
  const labels = [];
  for (let ns = 0; ns <= end; ns += step) {
    const last = ns + step > end;
    const words = `${ns / 1e6}${last ? " ms" : ""}`;
    labels.push(["tick", geometry.x(ns), geometry.axis + 20, words, last ? "end" : "middle"]);
  }
  return labels;
}

function axisPath(geometry, { step, end }) {
  let path = `M${geometry.left} ${geometry.axis}H${geometry.right}`;
  for (let ns = 0; ns <= end; ns += step) path += `M${r(geometry.x(ns))} ${geometry.axis}v5`;
  return path;
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
