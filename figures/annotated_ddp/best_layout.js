// The best known layout for a goal: boundaries in ready order for which the iteration is shortest.

const MOST_BUCKETS = 64;

/**
 * The places of the boundaries and the time of the best layout that is known.
 *
 * For each number of buckets, dynamic programming finds the boundaries for which the last all-reduce ends first: the
 * end of bucket k, after place p, is the least of max(launch at p, end of bucket k - 1 after q) + cost of q to p. The
 * copies out then follow, so each of these layouts is replayed, and so are those of all caps; the shortest counts. A
 * bucket has one element type.
 */
function bestLayout(model, conditions) {
  const sequence = rebuiltBuckets(model, [ONE_BUCKET]).flat();
  const layouts = CAPS.map((_, place) => layoutOf(rebuiltBuckets(model, capsInBytes(place))));
  const candidates = [...layouts, ...fastestEnds(model, sequence, conditions)];
  let best = null;
  for (const layout of candidates) {
    const { iteration_ns } = replay(model, planOf(layout), conditions);
    if (!best || iteration_ns < best.iteration_ns) best = { iteration_ns, layout };
  }
  return best;
}

/** For each number of buckets, the layout whose last all-reduce ends first. */
function fastestEnds(model, sequence, conditions) {
  const count = sequence.length;
  const whole = costsOf(model, [sequence], conditions);
  const [latency_ns, ns_per_byte] = ringCost(conditions.world_size, conditions.gbit_per_s);
  const bytesBefore = bytesBeforePlaces(sequence, model.sizes_bytes);
  const packed = costsOf(model, sequence.map((index) => [index]), conditions).pack_ns;
  const packedBefore = [0];
  packed.forEach((ns) => packedBefore.push(packedBefore.at(-1) + ns));
  const ready = readyByPlace(model, sequence, conditions);
  const layouts = [];
  let ends = new Array(count + 1).fill(Infinity);
  ends[0] = 0;
  const from = [];
  for (let buckets = 1; buckets <= Math.min(count, MOST_BUCKETS); buckets++) {
    const next = new Array(count + 1).fill(Infinity);
    const place = new Int32Array(count + 1);
    for (let end = buckets; end <= count; end++) {
      const launched = ready[end] + packedBefore[end] + buckets * whole.launch_ns;
      for (let begin = end - 1; begin >= buckets - 1; begin--) {
        if (model.keys[sequence[begin]] !== model.keys[sequence[end - 1]]) break;
        const sends_ns = latency_ns + (bytesBefore[end] - bytesBefore[begin]) * ns_per_byte;
        const done = Math.max(launched, ends[begin]) + sends_ns;
        if (done < next[end]) [next[end], place[end]] = [done, begin];
      }
    }
    from.push(place);
    ends = next;
    if (ends[count] < Infinity) layouts.push({ sequence, cuts: cutsFrom(from, count), edited: true });
  }
  return layouts;
}

function cutsFrom(from, count) {
  const cuts = [];
  for (let bucket = from.length - 1, end = count; bucket > 0; bucket--) cuts.unshift((end = from[bucket][end]));
  return cuts;
}

/** When all ranks have the first gradients of a sequence, by their number; of the first recorded iteration. */
function readyByPlace(model, sequence, { world_size, factor }) {
  const times = distinctRanks(model, world_size, factor).map(({ recorded, factor }) => scaledTimes(recorded[0], factor));
  const ready = sequence.map((index) => Math.max(...times.map(({ ready_ns }) => ready_ns[index])));
  return [0, ...runningMaximum(ready)];
}
