// Predictions in the browser: the closed form of simulator/engines/closed_form.py for a ring and constant speeds. All
// times are whole nanoseconds, and floating-point operations come in the simulator's order, so every number equals
// that of `simulator.predict(trace, fabric, assume=False, broadcast_buffers=False)`, for the fabric of page.py.

/**
 * Predict an iteration; of the recorded iterations the one of median duration is returned, as in predict.
 *
 * @param model See models.js.
 * @param plan Parameter indices by bucket, in launch order.
 * @param conditions world_size, gbit_per_s; factor on the compute times of the last rank; overlaps: false if all
 *   communication follows the backward pass, one all-reduce after the other; copiesOut: false if gradients are
 *   averaged in place.
 * @returns The fields of InteractiveIteration.answer in simulate_choices.py, and compute_ns. Without overlap,
 *   iteration_ns is the `no_overlap_ns` of predict.
 */
function replay(model, plan, conditions) {
  const { world_size, factor, overlaps } = conditions;
  const costs = costsOf(model, plan, conditions);
  const ranks = distinctRanks(model, world_size, factor);
  const count = Math.min(...ranks.map(({ recorded }) => recorded.length));
  const iterations = Array.from({ length: count }, (_, number) => {
    const rows = ranks.map((rank) => startOfRank(rank, number, plan, costs, overlaps));
    const { collectives, slowest } = overlaps ? overlapped(rows, costs) : afterBackward(rows, costs);
    return { rows, collectives, slowest, iteration_ns: slowest.now };
  });
  const alone = Array.from({ length: count }, (_, number) => {
    const times = ranks.map(({ recorded, count }) => count * (recorded[number].backward_end_ns + recorded[number].step_ns));
    return sum(times) / world_size;
  });
  const median = upperMedian(iterations, ({ iteration_ns }) => iteration_ns);
  return { ...answerOf(median, factor), compute_ns: roundToEven(upperMedian(alone, (ns) => ns)) };
}

function answerOf({ rows, collectives, slowest, iteration_ns }, factor) {
  const exposed = exposedIntervals(slowest, collectives);
  const exposed_ns = sum(exposed.map(([start, end]) => end - start));
  const stragglers_ns = sum(slowest.waits.map(([start, end]) => end - start)) - exposed_ns;
  const took = (...kinds) => sum(slowest.spans.map(([kind, , start, end]) => (kinds.includes(kind) ? end - start : 0)));
  const late = rows.filter(({ isStraggler }) => isStraggler);
  const shown = factor > 1 ? [...rows.filter(({ isStraggler }) => !isStraggler).slice(0, 1), ...late] : [slowest];
  return {
    iteration_ns,
    exposed_ns,
    parts: {
      computation_ns: took("forward", "backward", "step"),
      copies_ns: took("pack", "copy_out"),
      launches_ns: took("launch"),
      exposed_ns,
      stragglers_ns,
    },
    collectives,
    exposed,
    ranks: shown.map(({ rank, spans, ready_ns }) => ({ rank, spans, ready_ns })),
  };
}

// Ranks

/** Ranks that differ, in order: of ranks with equal times only the first. The straggler is the last rank. */
function distinctRanks(model, world_size, factor) {
  const sources = model.ranks.slice(0, world_size);
  const last = world_size - 1;
  const ranks = sources.map((recorded, source) => {
    const count = Math.floor((last - source) / sources.length) + 1;
    const loses = factor > 1 && last % sources.length === source;
    return { rank: source, recorded, factor: 1, count: count - loses, isStraggler: false };
  });
  if (factor > 1) {
    ranks.push({ rank: last, recorded: sources[last % sources.length], factor, count: 1, isStraggler: true });
  }
  return ranks.filter(({ count }) => count > 0);
}

/** State of one rank before its iteration: its compute times, and when it packs and launches each bucket. */
function startOfRank({ rank, recorded, factor, isStraggler }, number, plan, costs, overlaps) {
  const times = scaledTimes(recorded[number], factor);
  const row = { rank, isStraggler, times, ready_ns: times.ready_ns, readyCount: 0, now: 0, spans: [], waits: [] };
  if (!overlaps) return row;
  const full = plan.map((bucket) => bucket.reduce((last, index) => Math.max(last, times.ready_ns[index]), 0));
  const launch = runningMaximum(full);
  const packed = packedBefore(plan, full, times.inOrder, costs.pack_ns);
  return Object.assign(row, { launch, packed, ready_ns: new Array(times.ready_ns.length) });
}

/** Times multiplied by a factor. Each iteration keeps its last ones, which a drag does not change. */
function scaledTimes(times, factor) {
  if (times.scaled?.factor === factor) return times.scaled;
  const scale = (ns) => roundToEven(ns * factor);
  const ready_ns = times.ready_ns.map(scale);
  const [forward_ns, backward_end_ns, step_ns] = [times.forward_ns, times.backward_end_ns, times.step_ns].map(scale);
  times.scaled = { factor, forward_ns, ready_ns, inOrder: inReadyOrder(ready_ns), backward_end_ns, step_ns };
  return times.scaled;
}

/** Nanoseconds of packing before each launch: a bucket is packed when it is full, before the next launch. */
function packedBefore(plan, full, inOrder, pack_ns) {
  if (full.every((moment, bucket) => !bucket || moment > full[bucket - 1])) return pack_ns;
  const place = new Array(inOrder.length);
  inOrder.forEach((index, position) => (place[index] = position));
  const turn = plan.map((bucket) => bucket.reduce((last, index) => Math.max(last, place[index]), 0));
  const lastTurn = runningMaximum(turn);
  const packed = plan.map(() => 0);
  pack_ns.forEach((ns, bucket) => (packed[lastTurn.findIndex((last) => last >= turn[bucket])] += ns));
  return packed;
}

// Costs

/** Nanoseconds of each bucket's packing, launch, all-reduce and copies out. */
function costsOf(model, plan, conditions) {
  const { world_size, copiesOut } = conditions;
  const { processor, sizes_bytes } = model;
  const copies = plan.map((bucket) => {
    const each = (index) => roundToEven(processor.copy_start_ns + processor.copy_ns_per_byte * sizes_bytes[index]);
    return sum(bucket.map(each));
  });
  const none = plan.map(() => 0);
  const [latency_ns, ns_per_byte] = ringCost(conditions);
  return {
    pack_ns: model.communicates ? none : copies,
    copy_out_ns: model.includesCopyOut || !copiesOut ? none : copies,
    launch_ns: launchOn(model, plan.length, world_size),
    all_reduce_ns: plan.map((bucket) => {
      return roundToEven(latency_ns + sum(bucket.map((index) => sizes_bytes[index])) * ns_per_byte);
    }),
  };
}

/** Latency, and nanoseconds per byte, of an all-reduce on a ring of equal links. */
function ringCost({ world_size, gbit_per_s }) {
  return [2 * ((world_size - 1) * HOP_NS), ((2 * (world_size - 1)) / world_size) * (1e9 / ((gbit_per_s * 1e9) / 8))];
}

/** The cost of one launch without what recorded times already include; see charged_fabric in step_costs.py. */
function launchOn(model, buckets, world_size) {
  const before = model.recordedBuckets ?? buckets;
  const after = Math.max(before, buckets);
  const charged = (ns) => (model.communicates ? ns - Math.floor((ns * before) / after) : ns);
  const { launch_ns, stall_ns } = model.processor;
  return charged(launch_ns) + roundToEven(charged(stall_ns) * Math.log2(world_size));
}

// One iteration

/**
 * Both passes and the step of all ranks. Returns the slowest rank, and `[bucket, launched by all ranks, start, end]` of
 * each all-reduce.
 */
function overlapped(rows, costs) {
  rows.forEach((row) => compute(row, "forward", null, row.times.forward_ns));
  const collectives = [];
  let free = 0;
  costs.all_reduce_ns.forEach((duration, bucket) => {
    for (const row of rows) {
      const begin = bucket ? row.launch[bucket - 1] : row.times.forward_ns;
      computeBackward(row, bucket, begin, row.launch[bucket]);
      compute(row, "pack", bucket, row.packed[bucket]);
      compute(row, "launch", bucket, costs.launch_ns);
    }
    const launched = Math.max(...rows.map((row) => row.now));
    const start = Math.max(launched, free);
    free = start + duration;
    collectives.push([bucket, launched, start, free]);
  });
  for (const row of rows) {
    computeBackward(row, null, row.launch.at(-1), row.times.backward_end_ns);
    for (const [bucket, , , done] of collectives) {
      wait(row, bucket, done);
      compute(row, "copy_out", bucket, costs.copy_out_ns[bucket]);
    }
    compute(row, "step", null, row.times.step_ns);
  }
  return { collectives, slowest: longestOf(rows, ({ now }) => now) };
}

/** The same without overlap: after the backward pass each bucket is packed, averaged and copied out in turn. */
function afterBackward(rows, costs) {
  for (const row of rows) {
    compute(row, "forward", null, row.times.forward_ns);
    compute(row, "backward", null, row.times.backward_end_ns - row.times.forward_ns);
  }
  const slowest = longestOf(rows, ({ times }) => times.backward_end_ns + times.step_ns); // decides, as in predict
  const collectives = costs.all_reduce_ns.map((duration, bucket) => {
    for (const row of rows) {
      compute(row, "pack", bucket, costs.pack_ns[bucket]);
      compute(row, "launch", bucket, costs.launch_ns);
    }
    const start = slowest.now;
    for (const row of rows) {
      wait(row, bucket, start + duration);
      compute(row, "copy_out", bucket, costs.copy_out_ns[bucket]);
    }
    return [bucket, start, start, start + duration];
  });
  for (const row of rows) compute(row, "step", null, row.times.step_ns);
  return { collectives, slowest };
}

/** One piece of the backward pass, from `begin` to `end` of computation alone; its gradients become ready. */
function computeBackward(row, bucket, begin, end) {
  const delay = row.now - begin;
  const { times, ready_ns } = row;
  for (; row.readyCount < times.inOrder.length; row.readyCount++) {
    const index = times.inOrder[row.readyCount];
    if (times.ready_ns[index] > end) break;
    ready_ns[index] = times.ready_ns[index] + delay;
  }
  compute(row, "backward", bucket, end - begin);
}

function compute(row, kind, bucket, duration) {
  if (duration > 0) row.spans.push([kind, bucket, row.now, row.now + duration]);
  row.now += duration;
}

function wait(row, bucket, done) {
  row.waits.push([row.now, Math.max(row.now, done)]);
  compute(row, "wait", bucket, Math.max(0, done - row.now));
}

/** The times for which a rank waits while a collective runs, as disjoint intervals; both are in order of time. */
function exposedIntervals(row, collectives) {
  const running = collectives.map(([, , ...moments]) => moments);
  const intervals = [];
  for (const [low, high] of row.waits.flatMap(([begin, end]) => clipped(running, begin, end))) {
    const last = intervals.at(-1);
    if (last && low <= last[1]) last[1] = Math.max(last[1], high);
    else intervals.push([low, high]);
  }
  return intervals;
}

// Numbers

const upperMedian = (items, key) => items.toSorted((one, other) => key(one) - key(other))[items.length >> 1];

function runningMaximum(numbers) {
  let most = -Infinity;
  return numbers.map((number) => (most = Math.max(most, number)));
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** Round halves to even, as numpy does. */
function roundToEven(number) {
  const up = Math.round(number);
  return up - number === 0.5 && up % 2 ? up - 1 : up;
}
