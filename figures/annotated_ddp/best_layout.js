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
  const ranks = distinctRanks(model, conditions.world_size, conditions.factor);
  const times = ranks.map(({ recorded, factor }) => scaledTimes(recorded[0], factor).ready_ns);
  let [ready, packed] = [0, 0]; // when all ranks have the gradients so far, of the first recorded iteration
  const ends = [{ done: 0, cuts: [] }]; // by place; `cuts` are those of the buckets before it, and the place itself
  for (let end = 1; end <= sequence.length; end++) {
    packed += pack_ns[end - 1];
    ready = Math.max(ready, ...times.map((ready_ns) => ready_ns[sequence[end - 1]]));
    let best = { done: Infinity };
    for (let begin = end - 1; begin >= 0; begin--) {
      if (model.keys[sequence[begin]] !== model.keys[sequence[end - 1]]) break;
      const { done, cuts } = ends[begin];
      const launched = ready + packed + (cuts.length + 1) * launch_ns;
      const sent = Math.max(launched, done) + latency_ns + (bytesBefore[end] - bytesBefore[begin]) * ns_per_byte;
      if (sent < best.done) best = { done: sent, cuts: [...cuts, end] };
    }
    ends.push(best);
  }
  return { ...layout, cuts: ends.at(-1).cuts.slice(0, -1) };
}
