// Bucket layouts: `sequence` has the parameter indices in launch order, `cuts` the places of the boundaries in it. A
// cut of 12 means that the boundary lies after the twelfth gradient. `noun` is what one all-reduce averages; only
// buckets can be moved. Layouts are never changed, only replaced.

function layoutOf(buckets, noun = "bucket") {
  let place = 0;
  const cuts = buckets.slice(0, -1).map((bucket) => (place += bucket.length));
  return { sequence: buckets.flat(), cuts, noun, edited: false };
}

/** Parameter indices by bucket, as simulator.predict takes them. */
function planOf({ sequence, cuts }) {
  return [...cuts, sequence.length].map((end, bucket) => sequence.slice(cuts[bucket - 1] ?? 0, end));
}

/** Lowest and highest place of a boundary between its neighbours; every bucket keeps at least one gradient. */
function limitsOf({ sequence, cuts }, boundary) {
  return [(cuts[boundary - 1] ?? 0) + 1, (cuts[boundary + 1] ?? sequence.length) - 1];
}

function withBoundaryAt(layout, boundary, place) {
  const [low, high] = limitsOf(layout, boundary);
  return { ...layout, cuts: layout.cuts.with(boundary, Math.min(high, Math.max(low, place))), edited: true };
}

function withoutBoundary(layout, boundary) {
  return { ...layout, cuts: layout.cuts.toSpliced(boundary, 1), edited: true };
}

/** The first of these for which a function is largest. */
const longestOf = (all, size) => all.reduce((one, other) => (size(other) > size(one) ? other : one));

/** Split the bucket with the most bytes near its middle. Returns the layout and the number of the new boundary. */
function withLargestSplit(layout, bytesBefore) {
  const ends = [...layout.cuts, layout.sequence.length];
  const buckets = ends.map((end, bucket) => [ends[bucket - 1] ?? 0, end]).filter(([begin, end]) => end - begin > 1);
  if (!buckets.length) return { layout, boundary: -1 };
  const bytes = ([begin, end]) => bytesBefore[end] - bytesBefore[begin];
  const [begin, end] = longestOf(buckets, bytes);
  const middle = (bytesBefore[begin] + bytesBefore[end]) / 2;
  const place = nearestPlace(bytesBefore, middle, begin + 1, end - 1);
  const cuts = [...layout.cuts, place].sort((one, other) => one - other);
  return { layout: { ...layout, cuts, edited: true }, boundary: cuts.indexOf(place) };
}

/** Bytes of all gradients before each place of a sequence, and at last of all gradients. */
function bytesBeforePlaces(sequence, sizes) {
  const bytes = [0];
  for (const index of sequence) bytes.push(bytes.at(-1) + sizes[index]);
  return bytes;
}

/** The place from `low` to `high` whose bytes are nearest to `bytes`. */
function nearestPlace(bytesBefore, bytes, low, high) {
  const places = Array.from({ length: high - low + 1 }, (_, number) => low + number);
  return longestOf(places, (place) => -Math.abs(bytesBefore[place] - bytes));
}

/** A layout with what the picture needs of it; bucket 3 begins after `edges_bytes[3]` and ends at `edges_bytes[4]`. */
function shownOf(data, layout) {
  const bytesBefore = bytesBeforePlaces(layout.sequence, data.sizes_bytes);
  const edges_bytes = [0, ...layout.cuts, layout.sequence.length].map((place) => bytesBefore[place]);
  return { layout, buckets: planOf(layout), bytesBefore, edges_bytes };
}
