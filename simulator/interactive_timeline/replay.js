// Answers without a kernel: the closed form of simulator/engines/closed_form.py for one recorded rank, a ring and
// constant speeds. All times are whole nanoseconds, and floating-point operations come in the simulator's order, so
// every number equals that of simulator.predict.

/** A model as anywidget passes it to render, which answers questions itself. */
export function modelWithoutKernel(data) {
  const listeners = [];
  return {
    get: () => data,
    on: (event, listener) => listeners.push(listener),
    off: () => listeners.splice(0),
    send: ({ id, purpose, question }) => {
      const reply = { id, purpose, answer: replay(data, question) };
      listeners.forEach((listener) => listener(reply));
    },
  };
}

/** The answer to a question, as InteractiveIteration.answer in questions.py describes it. */
export function replay(data, question) {
  const { plan, world_size, factor } = question;
  const costs = data.replay;
  const rows = []; // an ordinary rank, and the straggler if there is one
  if (world_size > 1 || factor <= 1) rows.push(startOfRank(costs, plan, 0, 1));
  if (factor > 1) rows.push(startOfRank(costs, plan, world_size - 1, factor));
  const durations = allReduceDurations(data, question);
  rows.forEach((row) => compute(row, "forward", null, row.times.forward_ns));
  const launch_ns = costs.launch_ns[data.world_sizes.indexOf(world_size)];
  const collectives = launchBuckets(rows, launch_ns, durations);
  rows.forEach((row) => finish(row, costs, plan, collectives));
  const slowest = rows.reduce((one, other) => (other.now > one.now ? other : one));
  const exposed = exposedIntervals(slowest, collectives);
  const exposed_ns = sum(exposed.map(([start, end]) => end - start));
  const waited_ns = sum(slowest.waits.map(([start, end]) => end - start));
  return {
    iteration_ns: slowest.now,
    compute_ns: costs.backward_end_ns + costs.step_ns, // of each rank, without a straggler
    exposed_ns,
    stragglers_ns: waited_ns - exposed_ns,
    collectives,
    exposed,
    ranks: rows.map(({ rank, spans, ready_ns }) => ({ rank, spans, ready_ns })),
  };
}

/** State of one rank before its iteration: its compute times, and when it launches each bucket. */
function startOfRank(costs, plan, rank, factor) {
  const scaled = (ns) => roundToEven(ns * factor);
  const times = {
    forward_ns: scaled(costs.forward_ns),
    ready_ns: costs.ready_ns.map(scaled),
    backward_end_ns: scaled(costs.backward_end_ns),
    step_ns: scaled(costs.step_ns),
  };
  const full = plan.map((bucket) => Math.max(...bucket.map((index) => times.ready_ns[index])));
  const launch = runningMaximum(full);
  const inOrder = inReadyOrder(times.ready_ns);
  const packed = packedBefore(costs, plan, inOrder);
  const ready_ns = new Array(inOrder.length);
  return { rank, times, launch, packed, inOrder, ready_ns, readyCount: 0, now: 0, spans: [], waits: [] };
}

/** Nanoseconds of packing before each launch: a bucket is packed when it is full, before the next launch. */
function packedBefore(costs, plan, inOrder) {
  const place = new Array(inOrder.length);
  inOrder.forEach((index, position) => (place[index] = position));
  const turn = plan.map((bucket) => Math.max(...bucket.map((index) => place[index])));
  const lastTurn = runningMaximum(turn);
  const packed = plan.map(() => 0);
  plan.forEach((bucket, number) => {
    const firstLaunchAfter = lastTurn.filter((last) => last < turn[number]).length;
    packed[firstLaunchAfter] += sum(bucket.map((index) => costs.pack_ns[index]));
  });
  return packed;
}

/** Nanoseconds of each bucket's all-reduce: a latency and a time per byte that the simulator computed. */
function allReduceDurations(data, { plan, world_size, gbit_per_s }) {
  const row = data.replay.all_reduce[data.world_sizes.indexOf(world_size)];
  const [latency_ns, ns_per_byte] = row[data.gbit_per_s.indexOf(gbit_per_s)];
  return plan.map((bucket) => {
    const bytes = sum(bucket.map((index) => data.sizes_bytes[index]));
    return roundToEven(latency_ns + bytes * ns_per_byte);
  });
}

/** The backward pass of all ranks. Returns `[bucket, launched by all ranks, start, end]` of each all-reduce. */
function launchBuckets(rows, launch_ns, durations) {
  const collectives = [];
  let free = 0;
  durations.forEach((duration, bucket) => {
    for (const row of rows) {
      const begin = bucket ? row.launch[bucket - 1] : row.times.forward_ns;
      computeBackward(row, bucket, begin, row.launch[bucket]);
      compute(row, "pack", bucket, row.packed[bucket]);
      compute(row, "launch", bucket, launch_ns);
    }
    const launched = Math.max(...rows.map((row) => row.now));
    const start = Math.max(launched, free);
    free = start + duration;
    collectives.push([bucket, launched, start, free]);
  });
  rows.forEach((row) => computeBackward(row, null, row.launch.at(-1), row.times.backward_end_ns));
  return collectives;
}

/** The rest of a rank's iteration: wait for each bucket and copy its averages out, then the optimiser step. */
function finish(row, costs, plan, collectives) {
  plan.forEach((bucket, number) => {
    const done = collectives[number][3];
    row.waits.push([row.now, Math.max(row.now, done)]);
    compute(row, "wait", number, Math.max(0, done - row.now));
    compute(row, "copy_out", number, sum(bucket.map((index) => costs.copy_out_ns[index])));
  });
  compute(row, "step", null, row.times.step_ns);
}

/** One piece of the backward pass, from `begin` to `end` of computation alone; its gradients become ready. */
function computeBackward(row, bucket, begin, end) {
  const delay = row.now - begin;
  const { inOrder, times, ready_ns } = row;
  for (; row.readyCount < inOrder.length; row.readyCount++) {
    const index = inOrder[row.readyCount];
    if (times.ready_ns[index] > end) break;
    ready_ns[index] = times.ready_ns[index] + delay;
  }
  compute(row, "backward", bucket, end - begin);
}

function compute(row, kind, bucket, duration) {
  if (duration > 0) row.spans.push([kind, bucket, row.now, row.now + duration]);
  row.now += duration;
}

/** The times for which a rank waits while a collective runs, as disjoint intervals. */
function exposedIntervals(row, collectives) {
  const intervals = [];
  for (const [begin, end] of row.waits) {
    for (const [, , start, done] of collectives) {
      if (start >= end) break; // all later ones start later
      const low = Math.max(start, begin);
      const high = Math.min(done, end);
      if (low >= high) continue;
      const last = intervals.at(-1);
      if (last && low <= last[1]) last[1] = Math.max(last[1], high);
      else intervals.push([low, high]);
    }
  }
  return intervals;
}

function runningMaximum(numbers) {
  let most = -Infinity;
  return numbers.map((number) => (most = Math.max(most, number)));
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

/** Round halves to even, as numpy does. */
function roundToEven(number) {
  const floor = Math.floor(number);
  const rest = number - floor;
  if (rest === 0.5) return floor % 2 === 0 ? floor : floor + 1;
  return rest < 0.5 ? floor : floor + 1;
}
