// Models: what a prediction takes from a dropped file, a trace of ddplab or a file of torch's profiler, read as
// simulator/workload/compute_times.py does. Durations are whole nanoseconds from the start of their iteration.

/** The model in a file; see modelOfTrace for `gpus`. Throws an error of one line that names the file. */
async function modelInFile(file, gpus) {
  try {
    const text = await textOf(file);
    if (!/^\s*[{[]/.test(text)) throw new Error("expected a profile or a trace (.json, .json.gz), got another kind of file");
    const document = JSON.parse(text);
    return modelOfTrace(Array.isArray(document?.traceEvents) ? traceOfProfile(document, file.name) : document, gpus);
  } catch (error) {
    const damaged = "expected an undamaged trace or profile, got one that cannot be read: ";
    throw new Error(`${file.name}: ${error.name === "Error" ? "" : damaged}${error.message}`);
  }
}

async function textOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return new TextDecoder().decode(bytes);
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).text().catch(() => {
    throw new Error("truncated or corrupt gzip data");
  });
}

const FREE = { copy_start_ns: 0, copy_ns_per_byte: 0, launch_ns: 0, stall_ns: 0 };

/**
 * @param trace The JSON document of a trace.
 * @param gpus From page.py: what is known of each GPU, and the usual costs of data parallelism.
 * @returns names, sizes_bytes, keys and readyOrder by parameter index; `ranks`, with the times of each iteration; the
 *   recorded buckets; `processor`, the costs of copies and launches, which are 0 on an unknown device; what a step
 *   holds in memory, if it was counted; and whether it `ran` on the device, as only a profile shows.
 */
function modelOfTrace(trace, gpus) {
  requireTrace(trace);
  const { workload } = trace;
  const [communicates, recorded] = [workload.source !== "module", trace.ranks[0].iterations];
  const last = recorded.at(-1);
  const copiesAfterBackward = ({ buckets, backward_end_ns }) =>
    (buckets ?? []).some(({ copied_out_ns }) => (copied_out_ns ?? 0) > backward_end_ns);
  const gpu = gpus.known.find(([pattern]) => new RegExp(`\\b(?:${pattern})\\b`).test(workload.device_name.toLowerCase()));
  const bytes_per_s = workload.memory_bytes_per_s ?? gpu?.[1];
  return {
    title: workload.model,
    device: workload.device_name,
    names: workload.parameters.map(({ name }) => name),
    sizes_bytes: workload.parameters.map(({ size_bytes }) => size_bytes),
    keys: workload.parameters.map(({ dtype }) => dtype),
    communicates,
    recordedBuckets: communicates && last.layout != null ? trace.layouts[last.layout].length : null,
    includesCopyOut: communicates && recorded.some(copiesAfterBackward),
    readyOrder: inReadyOrder(last.ready_ns),
    ranks: trace.ranks.map(({ iterations }) => iterations.map((one) => timesOf(one, communicates))),
    processor: bytes_per_s ? { ...gpus.costs, copy_ns_per_byte: 2e9 / bytes_per_s } : FREE,
    memory: workload.memory ?? null,
    ran: workload.ran ?? false,
    buffer_bytes: sum((workload.buffers ?? []).map(({ size_bytes }) => size_bytes)),
    gib: Number(/(\d+) ?GB\b/i.exec(workload.device_name)?.[1] ?? gpu?.[2] ?? 0),
  };
}

/** The compute times of an iteration. With communication, the backward pass ends when everything is computed. */
function timesOf(iteration, communicates) {
  const start = iteration.forward_start_ns;
  const computed_ns = communicates ? iteration.computed_ns ?? Math.max(...iteration.ready_ns) : iteration.backward_end_ns;
  return {
    forward_ns: iteration.forward_end_ns - start,
    ready_ns: iteration.ready_ns.map((moment) => moment - start),
    backward_end_ns: computed_ns - start,
    exposed_ns: iteration.backward_end_ns - computed_ns,
    step_ns: iteration.end_ns - iteration.backward_end_ns,
  };
}

const isMoment = (ns) => Number.isFinite(ns) && Math.abs(ns) < 2 ** 62;

/** Throw an error of one line unless the document is a trace that the page can predict. */
function requireTrace(trace) {
  const workload = trace?.workload;
  const parameters = workload?.parameters;
  if (trace?.schema_version !== 1 || !parameters?.length || !trace.ranks?.length) {
    throw new Error(
      "expected a trace as `ddplab record` writes it, or a file of torch's profiler, got " +
        `a document with ${Object.keys(trace ?? {}).slice(0, 4).join(", ") || "no fields"}`,
    );
  }
  const names = parameters.map(({ name }) => name);
  const expect = (holds, words) => {
    if (!holds) throw new Error(`expected ${words}, got others; record or export it again`);
  };
  const sparse = parameters.find((one) => one.sparse);
  if (sparse) throw new Error(`expected dense gradients, got a sparse one of ${sparse.name}; use \`ddplab predict\``);
  expect([workload.model, workload.device_name, ...names].every((name) => typeof name === "string"), "names that are text");
  const sizes = [...parameters, ...(workload.buffers ?? [])].map(({ size_bytes }) => size_bytes);
  expect(sizes.every((size) => Number.isSafeInteger(size) && size >= 0), "sizes in whole bytes");
  expect(workload.memory_bytes_per_s == null || workload.memory_bytes_per_s >= 1, "a memory_bytes_per_s of at least 1");
  for (const { rank, iterations } of trace.ranks) {
    expect(iterations.length, `iterations of rank ${rank}`);
    iterations.forEach((iteration, number) => {
      const { ready_ns, forward_start_ns, forward_end_ns, backward_end_ns, end_ns } = iteration;
      const inOrder = [forward_start_ns, forward_end_ns, backward_end_ns, end_ns];
      const ascend = inOrder.every((ns, index) => isMoment(ns) && (index === 0 || ns >= inOrder[index - 1]));
      expect(ascend, `moments of rank ${rank}, iteration ${number}, in order`);
      expect(ready_ns.length === names.length, `a ready_ns for each of ${names.length} parameters`);
      const wrong = ready_ns.find((ns) => ns != null && !(isMoment(ns) && ns >= forward_end_ns && ns <= backward_end_ns));
      expect(wrong === undefined, `each ready_ns within the backward pass`);
      const unused = parameters.find((_, index) => ready_ns[index] == null);
      const where = `rank ${rank}, iteration ${number}`;
      if (unused) throw new Error(`${where}: ${unused.name} got no gradient; use \`ddplab predict\` for unused parameters`);
    });
  }
}
