// Scenes: the layouts of the five ways to average gradients, and choices as words after the # of the address.

/** Parameter indices by bucket, in launch order, for each scene of page.py. */
const PLANS = {
  naive: (model) => [...model.names.keys()].map((index) => [index]),
  flat: (model) => assignBuckets(model, [ONE_BUCKET], model.names.keys()),
  overlapped: (model) => initialBuckets(model, [0]),
  bucketed: (model, caps_bytes) => initialBuckets(model, caps_bytes),
  rebuilt: (model, caps_bytes) => assignBuckets(model, caps_bytes, model.readyOrder),
};

/** The layout of a scene and cap. Boundaries move in the order in which gradients fill the buckets. */
function layoutOfScene({ id, noun }, model, caps_bytes) {
  const plan = PLANS[id](model, caps_bytes);
  return layoutOf(id === "bucketed" ? plan.map((bucket) => bucket.toReversed()) : plan, noun);
}

/** The address of these choices; `values` has by name what can be chosen, except for the straggler. */
function addressOf(choices, values, { edited, cuts }) {
  const words = new URLSearchParams(Object.keys(values).map((name) => [name, values[name][choices[name]]]));
  words.set("straggler", choices.factor);
  if (edited) words.set("cuts", cuts.join("-"));
  return `#${words}`;
}

/** The choices that an address names, the places of moved boundaries or null, and the names of `wrong` values. */
function choicesOf(address, values, most_straggling) {
  const words = new URLSearchParams(address.replace(/^#/, ""));
  const places = Object.keys(values).map((name) => [name, values[name].map(String).indexOf(words.get(name))]);
  const found = Object.fromEntries(places);
  const factor = Number(words.get("straggler"));
  found.factor = factor >= 1 && factor <= most_straggling ? factor : -1;
  const isNamed = (name) => words.has(name === "factor" ? "straggler" : name);
  const wrong = Object.keys(found).filter((name) => isNamed(name) && found[name] < 0);
  const choices = Object.fromEntries(Object.entries(found).filter(([, value]) => value >= 0));
  return { choices, cuts: words.get("cuts")?.split("-").map(Number) ?? null, wrong };
}

/** Whether these are places of boundaries between so many gradients. */
function areCuts(cuts, count) {
  return cuts.every((cut, place) => Number.isInteger(cut) && cut > (cuts[place - 1] ?? 0) && cut < count);
}
