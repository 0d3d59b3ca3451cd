// Import of a file of torch's profiler: the steps of simulator/profiler_import for one rank and an unnamed model, with
// the same gradients and times (a test compares both). That package explains each rule, and has the constants. Which
// gradients shared a bucket is not needed here.

const ALL_REDUCE_RUNS = /^(?:nccl|rccl|xccl|hccl|gloo|ucc|mpi):all_?reduce(_coalesced)?$/;
const SHARDED = /^(?:FSDP::all_gather|FSDP::post_backward_reduce|FullyShardedDataParallel\b)/;
const ACTIVITIES = new Set(["kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"]);
const HOST_OPERATIONS = new Set(["cpu_op", "user_annotation", "operator"]);

/** The JSON document of the trace that `ddplab import kineto` makes of a file, as far as models.js reads it. */
function traceOfProfile(raw, fileName) {
  const file = readEvents(raw);
  const steps = alikeSteps(readSteps(file));
  const last = steps.at(-1);
  const parameters = parametersOf(last);
  return {
    schema_version: 1,
    workload: {
      model: fileName.split(".")[0],
      source: last.buckets.length || file.byName.has(FORWARD) ? "torch" : "module",
      parameters,
      device_name: file.gpu ?? "unknown",
      ran: file.gpu !== null,
    },
    layouts: last.buckets.length ? [last.buckets] : [],
    ranks: [{ rank: 0, iterations: steps.map((step) => iterationOf(step, last, parameters.length)) }],
  };
}

// Events

function readEvents(raw) {
  const events = raw.traceEvents.filter(({ ph, name, cat }) => ph === "X" && name && cat);
  if (!events.length) throw new Error("expected events of torch's profiler with a category and a duration, got none");
  const spans = spansOf(events);
  const calls = new Map(); // of the runtime, by correlation
  const [operations, ran] = [[], []];
  let launches = 0;
  events.forEach(({ name, cat, pid, tid, args = {} }, number) => {
    const kind = cat.toLowerCase();
    const [start_ns, end_ns] = spans[number];
    const event = { name, kind, pid, thread: `${pid} ${tid}`, start_ns, end_ns, args };
    if (ACTIVITIES.has(kind)) ran.push(event);
    else if (HOST_OPERATIONS.has(kind)) operations.push(event);
    else if (/runtime|driver/.test(kind)) {
      launches += name.toLowerCase().includes("launch");
      if (args.correlation > 0) calls.set(args.correlation, event);
    }
  });
  operations.sort((a, b) => a.start_ns - b.start_ns || b.end_ns - a.end_ns);
  const activities = launched(ran, calls);
  if ((launches || ran.length) && 2 * activities.length <= ran.length) {
    throw new Error("expected what the GPU ran with the correlation ids of its launches; profile with CUDA and CPU activities");
  }
  const kernels = activities.filter(({ kind }) => kind === "kernel");
  if (kernels.length && kernels.every(({ communicates }) => communicates) && launches > 2 * kernels.length) {
    throw new Error(`expected the kernels of ${launches} launches, got ${kernels.length}, all of a communication library: the profiler has lost the stream that computes`);
  }
  const early_ns = activities.reduce((most, one) => Math.max(most, one.launch_start_ns - one.start_ns), 0);
  if (early_ns > MOST_EARLY_NS) {
    throw new Error(`expected what the GPU ran after its launch, got ${(early_ns / 1e6).toFixed(1)} ms before it: two clocks differ`);
  }
  const devices = [...(raw.deviceProperties ?? []).entries()].filter(([, { name }]) => typeof name === "string" && name);
  const used = devices.find(([index]) => ran.some(({ args }) => args.device === index)) ?? devices[0];
  const ranks = raw.distributedInfo?.world_size;
  return { gpu: used?.[1].name ?? null, ranks, operations, activities, byName: Map.groupBy(operations, ({ name }) => name) };
}

function spansOf(events) {
  let first = Infinity;
  let last = -Infinity;
  const times = events.map(({ ts, dur }) => {
    const start = Number.parseFloat(ts);
    const duration = Number.parseFloat(dur || 0);
    if (duration < 0) throw new Error(`expected events of 0 us or longer, got ${duration}`);
    first = Math.min(first, start);
    last = Math.max(last, start + duration);
    return [start, duration];
  });
  if (!(last - first < LONGEST_US)) throw new Error("expected a number as `ts` of every event, none a million seconds apart");
  return times.map(([start, duration]) => [
    roundToEven((start - first) * 1e3),
    roundToEven((start - first + duration) * 1e3),
  ]);
}

/** What the GPU ran, with the thread and the moment of its launch. */
function launched(ran, calls) {
  const known = ran.filter(({ args }) => calls.has(args.correlation));
  const activities = known.map(({ name, kind, start_ns, end_ns, args }) => {
    const { thread, start_ns: launch_start_ns } = calls.get(args.correlation);
    const communicates = kind === "kernel" && /ccl/i.test(name);
    const size_bytes = Number.isInteger(args.bytes) ? args.bytes : null;
    const stream = `${args.device} ${args.stream}`;
    return { kind, communicates, stream, start_ns, end_ns, launch_start_ns, thread, size_bytes };
  });
  return activities.sort((a, b) => a.launch_start_ns - b.launch_start_ns || a.start_ns - b.start_ns);
}

// Steps

function readSteps(file) {
  if ([...file.byName.keys()].some((name) => SHARDED.test(name))) {
    throw new Error("expected training under DistributedDataParallel or of a plain module, got FSDP; profile the plain module");
  }
  const processes = new Set(file.byName.get(ACCUMULATE)?.map(({ pid }) => pid)).size;
  const marks = file.operations.filter(({ name, start_ns, end_ns }) => name.startsWith(STEP) && end_ns > start_ns);
  if (processes > 1 || new Set(marks.map(({ name }) => name)).size < marks.length) {
    throw new Error("expected the events of one rank, each once, got several; give the file that each rank's profiler wrote");
  }
  for (const [, ran] of Map.groupBy(file.activities, ({ stream }) => stream)) {
    const [first_ns, last_ns] = extent(ran);
    if (sum(ran.map(({ start_ns, end_ns }) => end_ns - start_ns)) > MOST_BUSY * (last_ns - first_ns)) {
      throw new Error("expected what a GPU stream ran one after another, got longer ones; give each `dur` in microseconds");
    }
  }
  const reader = readerOf(file);
  const steps = [];
  let done_ns = 0;
  for (const window of windowsOf(file)) {
    const start_ns = Math.max(window.start_ns, done_ns);
    done_ns = Math.max(done_ns, extent(within(reader.onStream, window.start_ns, window.next_ns - 1, launchOf))[1]);
    const step = stepOf(reader, window, start_ns, Math.max(start_ns, window.end_ns, done_ns));
    if (step) steps.push(step);
  }
  if (!steps.length) throw new Error(`expected events named ${ACCUMULATE}, got none; profile training steps with ProfilerActivity.CPU`);
  return steps;
}

function windowsOf({ operations, byName }) {
  const marks = operations.filter(({ name }) => name.startsWith(STEP));
  if (marks.length) {
    return marks.map((mark, number) => {
      const next_ns = marks[number + 1]?.start_ns ?? mark.end_ns;
      return { start_ns: mark.start_ns, next_ns, end_ns: Math.min(mark.end_ns, next_ns) };
    });
  }
  const forwards = byName.get(FORWARD) ?? [];
  const optimizers = operations.filter(({ name }) => name.startsWith(OPTIMIZER));
  const edges = forwards.length
    ? [...forwards.map(startOf), operations.reduce((last, { end_ns }) => Math.max(last, end_ns), 0)]
    : [operations[0]?.start_ns ?? 0, ...optimizers.map(({ end_ns }) => end_ns)];
  if (edges.length < 2) throw new Error("expected training steps, got none; call `step()` of the profiler after each step");
  return edges.slice(1).map((next_ns, number) => ({ start_ns: edges[number], next_ns, end_ns: next_ns }));
}

/** Lookups that all steps of a file share. */
function readerOf(file) {
  const computing = file.activities.filter(({ communicates }) => !communicates);
  const byThread = Map.groupBy(computing, threadOf);
  const stream = busiestStream(computing);
  const reader = {
    ...file,
    byThread,
    stream,
    onGpu: computing.length > 0,
    onStream: computing.filter((one) => one.stream === stream),
    collectives: Map.groupBy(file.activities.filter(({ communicates }) => communicates), threadOf),
    nodes: file.operations.filter(({ name }) => name.startsWith(NODE) || name.startsWith(ACCUMULATE)).map(startOf),
    optimizers: [...file.byName.keys()].filter((name) => name.startsWith(OPTIMIZER)),
    allReduceRuns: [...file.byName.keys()].filter((name) => ALL_REDUCE_RUNS.test(name)),
  };
  reader.packing = new Set(launchedInside(reader, file.byName.get(PACK) ?? []));
  reader.producing = Map.groupBy(computing.filter((one) => !reader.packing.has(one)), threadOf);
  return reader;
}

function busiestStream(activities) {
  const streams = Map.groupBy(activities.filter(({ kind }) => kind === "kernel"), ({ stream }) => stream);
  return [...streams].length && longestOf([...streams], ([, kernels]) => sum(kernels.map(({ start_ns, end_ns }) => end_ns - start_ns)))[0];
}

function stepOf(reader, window, start_ns, end_ns) {
  let gradients = accumulatedIn(reader, window, start_ns);
  if (!gradients.length) return null;
  if (backwardPasses(reader, window, gradients) > 1) {
    throw new Error("expected one backward pass in each step; call `step()` of the profiler after each backward pass");
  }
  const lastForward = named(reader, window, FORWARD).at(-1);
  if (gradients[0].hooks.start_ns < lastForward?.start_ns) {
    throw new Error("expected all forward passes of a step before its backward pass, got a gradient before the last; profile one wrapper");
  }
  const divide_ns = lastForward?.end_ns ?? firstNode(reader, window.start_ns);
  let forward_end_ns = Math.max(start_ns, divide_ns);
  let backward_start_ns = firstNode(reader, forward_end_ns);
  if (reader.onGpu) {
    const forward = within(reader.onStream, window.start_ns, divide_ns - 1, launchOf);
    const backward = within(reader.onStream, divide_ns, window.next_ns - 1, launchOf);
    forward_end_ns = Math.max(start_ns, extent(forward)[1]);
    backward_start_ns = Math.max(forward_end_ns, backward.length ? extent(backward)[0] : 0);
  }
  gradients = gradients.map((one) => ({ ...one, ready_ns: Math.max(one.ready_ns, backward_start_ns) }));
  const allReduces = allReducesIn(reader, window, gradients);
  const isInteger = ({ dtype }) => /int|long/.test((dtype ?? "").toLowerCase()) && dtype.toLowerCase() in ELEMENT_BYTES;
  return {
    ...{ onGpu: reader.onGpu, forward_start_ns: start_ns, forward_end_ns, gradients, allReduces, end_ns },
    computed_ns: gradients.reduce((last, one) => Math.max(last, one.ready_ns), 0),
    buckets: allReduces.filter((one) => one.inHook && !isInteger(one)),
    copies: copiesIn(reader, window),
    optimizer: optimizerIn(reader, window),
  };
}

function accumulatedIn(reader, window, start_ns) {
  const hooksOf = Map.groupBy(named(reader, window, NODE + ACCUMULATE), threadOf);
  return named(reader, window, ACCUMULATE).map((one) => {
    let hooks = latest(hooksOf.get(one.thread), one.start_ns, startOf);
    if (!hooks || hooks.end_ns < one.end_ns) hooks = one;
    let ready_ns = one.end_ns;
    if (reader.onGpu) {
      const producer = latest(reader.producing.get(one.thread), hooks.start_ns - 1, launchOf);
      const isOfStep = producer && producer.launch_start_ns >= window.start_ns;
      ready_ns = isOfStep ? producer.end_ns : Math.max(start_ns, hooks.start_ns);
    }
    return { ready_ns, ...shapeAndDtype(one), hooks };
  });
}

function backwardPasses(reader, window, gradients) {
  const threads = new Set(named(reader, window, ...reader.optimizers).map(threadOf));
  const first = gradients[0].hooks.start_ns;
  let done_ns = first;
  const edges = [];
  for (const one of within(reader.operations, first, gradients.at(-1).hooks.start_ns - 1, startOf)) {
    if (!threads.has(one.thread) || one.start_ns < done_ns) continue;
    done_ns = one.end_ns;
    if (one.name.startsWith("aten::") || one.name === FORWARD) edges.push(one.start_ns); // a forward pass may compute the loss
  }
  const blocks = Map.groupBy(gradients, ({ hooks }) => upperBound(edges, hooks.start_ns, (edge) => edge));
  const shapes = new Set([...blocks.values()].map((block) => JSON.stringify(block.map(({ shape }) => shape))));
  return shapes.size === 1 ? blocks.size : 1;
}

function firstNode({ nodes }, start_ns) {
  return nodes[Math.min(lowerBound(nodes, start_ns, (node) => node), nodes.length - 1)];
}

function allReducesIn(reader, window, gradients) {
  const accumulated = gradients.map(({ hooks }) => hooks.start_ns);
  const hooksOf = Map.groupBy(gradients.map(({ hooks }) => hooks), threadOf);
  let calls = named(reader, window, ...ALL_REDUCE_CALLS);
  let runs = named(reader, window, ...reader.allReduceRuns);
  const described = named(reader, window, COLLECTIVE_CALL);
  [calls, runs] = [calls.length ? calls : runs, runs.length ? runs : calls].map((some) => some.toSorted(byStart));
  return calls.map((call, number) => {
    const run = runs.length === calls.length ? runs[number] : call;
    const ran = within(reader.collectives.get(call.thread), call.start_ns, call.end_ns, launchOf);
    if (reader.ranks > 1 && reader.onGpu && !ran.length && run.thread === call.thread) {
      throw new Error(`expected a kernel of each all-reduce of ${reader.ranks} ranks, got none of one; profile one rank alone`);
    }
    const count = upperBound(accumulated, call.start_ns, (moment) => moment);
    const hooks = latest(hooksOf.get(call.thread), call.start_ns, startOf);
    const end_ns = ran.length ? extent(ran)[1] : reader.onGpu ? call.start_ns : run.end_ns;
    const message = messageOf(run, described) ?? messageOf(call, []) ?? [null, null];
    const inHook = hooks !== null && hooks.end_ns >= call.start_ns;
    return { issued_ns: call.start_ns, end_ns, size_bytes: message[0], dtype: message[1], gradients: count, inHook };
  });
}

function copiesIn(reader, window) {
  return named(reader, window, COPY_OUT).map((call) => {
    const ran = launchedInside(reader, [call]);
    const [start_ns, end_ns] = extent(ran.length ? ran : [call]);
    const size_bytes = ran.find((one) => one.size_bytes)?.size_bytes ?? messageOf(call, [])?.[0] ?? null;
    return { start_ns, end_ns, size_bytes };
  });
}

function optimizerIn(reader, window) {
  const calls = named(reader, window, ...reader.optimizers);
  const ran = reader.onGpu ? launchedInside(reader, calls).filter(({ stream }) => stream === reader.stream) : calls;
  return ran.length ? extent(ran) : null;
}

/** The steps with all-reduces, if there are any, that have the gradients and buckets of most of them. */
function alikeSteps(steps) {
  const averaging = steps.some(({ buckets }) => buckets.length) ? steps.filter(({ buckets }) => buckets.length) : steps;
  const groups = Map.groupBy(averaging.toReversed(), signature);
  const [usual] = longestOf([...groups], ([, some]) => some.length);
  return averaging.filter((step) => signature(step) === usual);
}

function signature(step) {
  const shapes = averaged(step).map(({ shape }) => JSON.stringify(shape));
  return JSON.stringify([step.buckets.map(({ size_bytes }) => size_bytes), shapes.sort()]);
}

// Messages

function shapeAndDtype({ args }) {
  const [dims, types] = [args["Input Dims"], args["Input type"]];
  const dtype = Array.isArray(types) && typeof types[0] === "string" ? types[0] : "";
  const shape = Array.isArray(dims) ? dims[0] : null;
  const isShape = dtype && Array.isArray(shape) && shape.every((size) => Number.isInteger(size) && size >= 0);
  return isShape && product(shape) <= MOST_ELEMENTS ? { shape, dtype } : { shape: null, dtype: null };
}

function messageOf(call, described) {
  const { shape, dtype } = shapeAndDtype(call);
  const each = ELEMENT_BYTES[dtype?.toLowerCase()];
  if (shape && each) return [product(shape) * each, dtype];
  const place = upperBound(described, call.start_ns, startOf);
  for (const one of described.slice(Math.max(0, place - MOST_NESTED), place).reverse()) {
    const [elements, name] = [one.args["In msg nelems"], one.args.dtype];
    const contains = one.thread === call.thread && one.end_ns >= call.start_ns;
    if (!contains || !Number.isInteger(elements) || typeof name !== "string") continue;
    const bytes = ELEMENT_BYTES[name.toLowerCase()];
    return bytes === undefined || elements < 0 ? null : [elements * bytes, name];
  }
  return null;
}

// Gradients and iterations

/** The gradients of a step whose bucket was sent; all, if none was. */
const averaged = ({ buckets, gradients }) => gradients.slice(0, buckets.at(-1)?.gradients ?? gradients.length);

/** The parameters in the reverse of ready order, as if they were registered so. */
function parametersOf(last) {
  const gradients = averaged(last);
  const noted = new Set((last.buckets.length ? last.buckets : last.allReduces).map(({ dtype }) => dtype).filter(Boolean));
  const usual = (noted.size === 1 && DTYPES[[...noted][0].toLowerCase()]) || "float32";
  const sizes = sizesOf(last, gradients, usual);
  if (sizes.includes(null)) {
    throw new Error("the sizes of the gradients are neither in the file nor follow from it; profile with record_shapes=True");
  }
  const parameters = gradients.map(({ dtype }, place) => {
    const named = DTYPES[(dtype ?? "").toLowerCase()] ?? usual;
    const fits = sizes[place] % ELEMENT_BYTES[named] === 0;
    return { name: `parameter ${gradients.length - 1 - place}`, dtype: fits ? named : "int8", size_bytes: sizes[place] };
  });
  return parameters.reverse();
}

/** By the shapes in the file, or else by the copies out of the buckets, if they fit what was sent. */
function sizesOf({ copies, buckets }, gradients, usual) {
  const sizes = gradients.map(({ shape, dtype }) => {
    return shape ? product(shape) * (ELEMENT_BYTES[(dtype ?? "").toLowerCase()] ?? ELEMENT_BYTES[usual]) : null;
  });
  const copied = copies.map(({ size_bytes }) => size_bytes);
  if (!sizes.includes(null) || copied.length !== sizes.length || copied.includes(null)) return sizes;
  let sent = 0;
  const fits = buckets.every(({ gradients, size_bytes }) => {
    sent += size_bytes ?? 0;
    return size_bytes === null || sum(copied.slice(0, gradients)) === sent;
  });
  return fits ? copied : sizes;
}

function iterationOf(step, last, count) {
  const shapeOf = ({ shape }) => JSON.stringify(shape);
  const waiting = Map.groupBy(step.gradients.slice(0, count).toReversed(), shapeOf);
  const inOrder = averaged(last).map((gradient) => waiting.get(shapeOf(gradient)).pop());
  const copies = step.copies.length === count ? step.copies : [];
  const backward_end_ns = Math.max(step.computed_ns, ...averagedAt(step, copies));
  const copied_out_ns = Math.max(...copies.map(({ end_ns }) => end_ns));
  const stepped_ns = step.optimizer && step.optimizer[1] >= backward_end_ns ? step.optimizer[1] : 0;
  return {
    ...step,
    backward_end_ns,
    end_ns: Math.max(step.end_ns, backward_end_ns, stepped_ns),
    layout: step.buckets.length ? 0 : null,
    ready_ns: inOrder.map(({ ready_ns }) => ready_ns).reverse(),
    buckets: copies.length && step.buckets.length ? [{ copied_out_ns }] : [],
  };
}

/** When each bucket was averaged. Without a GPU, the script then goes on with its copies or with the optimiser. */
function averagedAt({ buckets, optimizer, onGpu, end_ns }, copies) {
  return buckets.map((one, number) => {
    const first = copies[buckets[number - 1]?.gradients ?? 0];
    const wentOn_ns = onGpu ? Infinity : first?.start_ns ?? optimizer?.[0] ?? Infinity;
    return Math.max(one.issued_ns, Math.min(one.end_ns, end_ns, wentOn_ns));
  });
}

// Lookups in sorted lists

const startOf = ({ start_ns }) => start_ns;
const launchOf = ({ launch_start_ns }) => launch_start_ns;
const threadOf = ({ thread }) => thread;
const byStart = (one, other) => one.start_ns - other.start_ns;

/** The operations of these names that begin in a step, name by name. */
function named({ byName }, { start_ns, next_ns }, ...names) {
  return names.flatMap((name) => within(byName.get(name), start_ns, next_ns - 1, startOf));
}

function launchedInside({ byThread }, operations) {
  return operations.flatMap(({ thread, start_ns, end_ns }) => within(byThread.get(thread), start_ns, end_ns, launchOf));
}

function within(items, first, last, moment) {
  return items ? items.slice(lowerBound(items, first, moment), upperBound(items, last, moment)) : [];
}

const latest = (items, at, moment) => items?.[upperBound(items, at, moment) - 1] ?? null;

/** The number of items before `value`. */
function lowerBound(items, value, moment) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moment(items[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The number of items up to `value`, a whole number as all moments are. */
const upperBound = (items, value, moment) => lowerBound(items, value + 1, moment);

function extent(ran) {
  return ran.reduce(([first, last], { start_ns, end_ns }) => [Math.min(first, start_ns), Math.max(last, end_ns)], [Infinity, 0]);
}

const product = (sizes) => sizes.reduce((total, size) => total * size, 1);
