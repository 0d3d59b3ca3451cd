// Buckets: the rule of reference/bucketing.py, which a dropped trace needs in the browser. A test compares both.

const ONE_BUCKET = 2 ** 62;

/** Parameter indices by bucket, in the order in which the buckets closed; `order` is that of the walk. */
function assignBuckets({ sizes_bytes, keys }, caps_bytes, order) {
  const buckets = [];
  const open = new Map(); // by key, in the order in which they were opened
  const closed = new Map();
  for (const index of order) {
    const key = keys[index];
    if (!open.has(key)) open.set(key, { members: [], bytes: 0 });
    const bucket = open.get(key);
    bucket.members.push(index);
    bucket.bytes += sizes_bytes[index];
    const count = closed.get(key) ?? 0;
    if (bucket.bytes < caps_bytes[Math.min(count, caps_bytes.length - 1)]) continue;
    buckets.push(bucket.members);
    open.delete(key);
    closed.set(key, count + 1);
  }
  return [...buckets, ...[...open.values()].map(({ members }) => members)];
}

/** Buckets at construction, in launch order: over registration order, sorted by their first index, then reversed. */
function initialBuckets(model, caps_bytes) {
  const buckets = assignBuckets(model, caps_bytes, model.names.keys());
  return buckets.sort((one, other) => Math.min(...one) - Math.min(...other)).reverse();
}
