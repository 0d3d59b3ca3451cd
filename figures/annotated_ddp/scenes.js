// Scenes: the five ways to average gradients, from reference/minimal.py to the rebuilt buckets of reference/reducer.py.

/** `plan` has the parameter indices by bucket, in launch order; `overlaps` and `copiesOut` are those of replay.js. */
const SCENES = [
  { id: "naive", overlaps: false, copiesOut: false, plan: (model) => [...model.names.keys()].map((index) => [index]) },
  {
    id: "flat",
    overlaps: false,
    copiesOut: true,
    plan: (model) => assignBuckets(model, [ONE_BUCKET], model.names.keys()),
  },
  { id: "asynchronous", overlaps: true, copiesOut: true, plan: (model) => initialBuckets(model, [0]) },
  {
    id: "bucketed",
    overlaps: true,
    copiesOut: true,
    isEditable: true,
    plan: (model, cap) => initialBuckets(model, capsInBytes(cap)),
  },
  {
    id: "rebuilt",
    overlaps: true,
    copiesOut: true,
    isEditable: true,
    plan: (model, cap) => rebuiltBuckets(model, capsInBytes(cap)),
  },
];
const GBIT_PER_S = [1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 100, 200, 400];
const WORLD_SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const MOST_STRAGGLING = 2;

/** The choices at the start: three buckets, of which each boundary changes the iteration of ResNet-50 when it moves. */
function choicesAtStart() {
  return { scene: 0, gbit: GBIT_PER_S.indexOf(20), gpus: WORLD_SIZES.indexOf(32), factor: 1, cap: capOf(35) };
}

function capOf(mib) {
  return CAPS.findIndex(([first, ...others]) => first === mib && !others.length);
}

/** What replay.js takes for the choices in a scene. */
function conditionsOf({ gbit, gpus, factor }, { overlaps, copiesOut }) {
  return { gbit_per_s: GBIT_PER_S[gbit], world_size: WORLD_SIZES[gpus], factor, overlaps, copiesOut };
}

/** The iteration to compare a scene with: that of the scene before, or for the first one computation alone. */
function baselineOf(model, choices) {
  const before = SCENES[choices.scene - 1];
  if (before) return replay(model, before.plan(model, choices.cap), conditionsOf(choices, before));
  const { compute_ns } = replay(model, SCENES[1].plan(model), conditionsOf(choices, SCENES[1]));
  const nothing = { copies_ns: 0, launches_ns: 0, exposed_ns: 0, stragglers_ns: 0 };
  return { iteration_ns: compute_ns, parts: { computation_ns: compute_ns, ...nothing } };
}

/** Points from 0, as torch's default cap, to 100, as the best known layout. */
function scoreOf(iteration_ns, default_ns, best_ns) {
  if (iteration_ns <= best_ns) return 100;
  return Math.max(0, Math.floor((100 * (default_ns - iteration_ns)) / (default_ns - best_ns)));
}
