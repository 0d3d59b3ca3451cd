// Address: the choices of the reader, written after the # of the page's address and read from there.

/** The choices in words; `cuts` are the places of moved boundaries, or null. */
function addressOf({ scene, gbit, gpus, factor, cap }, modelName, cuts) {
  const words = new URLSearchParams({
    scene: SCENES[scene].id,
    model: modelName,
    gbit: GBIT_PER_S[gbit],
    gpus: WORLD_SIZES[gpus],
    straggler: factor,
    cap: cap === TORCHS_DEFAULT ? "default" : CAPS[cap][0],
  });
  if (cuts) words.set("cuts", cuts.join("-"));
  return `#${words}`;
}

/**
 * The choices that an address names, without those that it does not name or that do not exist; `wrong` has the latter.
 *
 * @param models Names of the models that the page has.
 */
function choicesOf(address, models) {
  const words = new URLSearchParams(address.replace(/^#/, ""));
  const cap = words.get("cap");
  const factor = Number(words.get("straggler") ?? NaN);
  const found = {
    scene: SCENES.findIndex(({ id }) => id === words.get("scene")),
    model: models.indexOf(words.get("model")),
    gbit: GBIT_PER_S.indexOf(Number(words.get("gbit"))),
    gpus: WORLD_SIZES.indexOf(Number(words.get("gpus"))),
    straggler: factor >= 1 && factor <= MOST_STRAGGLING ? factor : -1,
    cap: cap === "default" ? TORCHS_DEFAULT : capOf(cap === "Infinity" ? Infinity : Number(cap)),
  };
  const wrong = Object.keys(found).filter((name) => words.has(name) && found[name] < 0);
  const { straggler, ...choices } = Object.fromEntries(Object.entries(found).filter(([, value]) => value >= 0));
  if (straggler) choices.factor = straggler;
  return { choices, cuts: words.get("cuts")?.split("-").map(Number) ?? null, wrong };
}

/** Whether these are places of boundaries between so many gradients. */
function areCuts(cuts, count) {
  return cuts.every((cut, place) => Number.isInteger(cut) && cut > (cuts[place - 1] ?? 0) && cut < count);
}
