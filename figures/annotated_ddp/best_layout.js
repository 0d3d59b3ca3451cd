// The best known layout for a goal: boundaries in the order of a scene for which the iteration is shortest.

/** The layout and the time of the fastest one that is known: of these, and of the one whose last all-reduce ends first. */
function bestLayout(model, layouts, conditions) {
  const all = [...layouts, fastestEnd(model, layouts[0], conditions)];
  const times = all.map((layout) => replay(model, planOf(layout), conditions).iteration_ns);
  const iteration_ns = Math.min(...times);
  return { iteration_ns, layout: { ...all[times.indexOf(iteration_ns)], edited: true } };
}

/**
 * The layout whose last all-reduce ends first, by dynamic programming: the end of a bucket from place q to p is the least
 * of max(launch at p, end of the bucket before q) + cost of q to p. A bucket has one element type.
 */
function fastestEnd(model, layout, conditions) {
  const { sequence } = layout;
  const { launch_ns } = costsOf(model, [sequence], conditions);
  const { pack_ns } = costsOf(model, sequence.map((index) => [index]), conditions);
  const [latency_ns, ns_per_byte] = ringCost(conditions);
  const bytesBefore = bytesBeforePlaces(sequence, model.sizes_bytes);
  const ready = readyByPlace(model, sequence, conditions);
  const ends = [{ done: 0, cuts: [] }]; // by place; `cuts` are those of the buckets before it, and the place itself
  let packed = 0;
  for (let end = 1; end <= sequence.length; end++) {
    packed += pack_ns[end - 1];
    let best = { done: Infinity };
    for (let begin = end - 1; begin >= 0; begin--) {
      if (model.keys[sequence[begin]] !== model.keys[sequence[end - 1]]) break;
      const { done, cuts } = ends[begin];
      const launched = ready[end] + packed + (cuts.length + 1) * launch_ns;
      const sent = Math.max(launched, done) + latency_ns + (bytesBefore[end] - bytesBefore[begin]) * ns_per_byte;
      if (sent < best.done) best = { done: sent, cuts: [...cuts, end] };
    }
    ends.push(best);
  }
  return { ...layout, cuts: ends.at(-1).cuts.slice(0, -1) };
}

/** When all ranks have the first gradients of a sequence, by their number; of the first recorded iteration. */
function readyByPlace(model, sequence, { world_size, factor }) {
  const times = distinctRanks(model, world_size, factor).map(({ recorded, factor }) => scaledTimes(recorded[0], factor));
  const ready = sequence.map((index) => Math.max(...times.map(({ ready_ns }) => ready_ns[index])));
  return [0, ...runningMaximum(ready)];
}
