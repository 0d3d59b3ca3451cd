// The best known layout for a goal: boundaries in the order of a scene for which the iteration is shortest.

const MOST_BUCKETS = 64;

/**
 * The layout and the time of the fastest one that is known: these, and those whose last all-reduce ends first.
 *
 * For each number of buckets, dynamic programming finds the boundaries for which the last all-reduce ends first: the
 * end of bucket k, after place p, is the least of max(launch at p, end of bucket k - 1 after q) + cost of q to p. The
 * copies out then follow, so each of these layouts is replayed; the shortest counts. A bucket has one element type.
 */
function bestLayout(model, layouts, conditions) {
  const all = [...layouts, ...fastestEnds(model, layouts[0], conditions)];
  const times = all.map((layout) => replay(model, planOf(layout), conditions).iteration_ns);
  const iteration_ns = Math.min(...times);
  return { iteration_ns, layout: { ...all[times.indexOf(iteration_ns)], edited: true } };
}

/** For each number of buckets, the layout whose last all-reduce ends first. */
function fastestEnds(model, layout, conditions) {
  const { sequence } = layout;
  const count = sequence.length;
  const { launch_ns } = costsOf(model, [sequence], conditions);
  const [latency_ns, ns_per_byte] = ringCost(conditions);
  const bytesBefore = bytesBeforePlaces(sequence, model.sizes_bytes);
  const packedBefore = [0];
  for (const ns of costsOf(model, sequence.map((index) => [index]), conditions).pack_ns) packedBefore.push(packedBefore.at(-1) + ns);
  const ready = readyByPlace(model, sequence, conditions);
  const layouts = [];
  let ends = [{ ns: 0 }]; // by place, of the bucket before
  for (let buckets = 1; buckets <= Math.min(count, MOST_BUCKETS); buckets++) {
    const next = [];
    for (let end = buckets; end <= count; end++) {
      const launched = ready[end] + packedBefore[end] + buckets * launch_ns;
      let [least, from] = [Infinity, null];
      for (let begin = end - 1; begin >= buckets - 1; begin--) {
        if (model.keys[sequence[begin]] !== model.keys[sequence[end - 1]]) break;
        if (!ends[begin]) continue;
        const done = Math.max(launched, ends[begin].ns) + latency_ns + (bytesBefore[end] - bytesBefore[begin]) * ns_per_byte;
        if (done < least) [least, from] = [done, begin];
      }
      if (from !== null) next[end] = { ns: least, before: ends[from], place: from };
    }
    ends = next;
    if (ends[count]) layouts.push({ ...layout, cuts: cutsBefore(ends[count]) });
  }
  return layouts;
}

function cutsBefore({ before, place }) {
  return before?.place === undefined ? [place].filter(Boolean) : [...cutsBefore(before), place];
}

/** When all ranks have the first gradients of a sequence, by their number; of the first recorded iteration. */
function readyByPlace(model, sequence, { world_size, factor }) {
  const times = distinctRanks(model, world_size, factor).map(({ recorded, factor }) => scaledTimes(recorded[0], factor));
  const ready = sequence.map((index) => Math.max(...times.map(({ ready_ns }) => ready_ns[index])));
  return [0, ...runningMaximum(ready)];
}
