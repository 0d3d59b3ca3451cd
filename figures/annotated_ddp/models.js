// Models: what a prediction takes from a trace, read as simulator/workload/compute_times.py does. Durations are whole
// nanoseconds from the start of their iteration.

/**
 * @param trace The JSON document of a trace.
 * @param costsOfGpus From page.py: the memory rate of each known GPU, and the usual costs of data parallelism.
 * @returns names, sizes_bytes, keys and readyOrder by parameter index; `ranks`, with the times of each iteration; the
 *   recorded buckets; and `processor`, the costs of copies and launches, which are 0 on an unknown device.
 */
function modelOfTrace(trace, costsOfGpus) {
  requireTrace(trace);
  const { workload } = trace;
  const communicates = workload.source !== "module";
  const recorded = trace.ranks[0].iterations;
  const last = recorded.at(-1);
  const copiesAfterBackward = ({ buckets, backward_end_ns }) =>
    (buckets ?? []).some(({ copied_out_ns }) => (copied_out_ns ?? 0) > backward_end_ns);
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
    processor: processorOf(workload, costsOfGpus),
  };
}

/** The compute times of an iteration. With communication, the backward pass ends when everything is computed. */
function timesOf(iteration, communicates) {
  const start = iteration.forward_start_ns;
  const computed_ns = communicates
    ? iteration.computed_ns ?? Math.max(...iteration.ready_ns)
    : iteration.backward_end_ns;
  return {
    forward_ns: iteration.forward_end_ns - start,
    ready_ns: iteration.ready_ns.map((moment) => moment - start),
    backward_end_ns: computed_ns - start,
    step_ns: iteration.end_ns - iteration.backward_end_ns,
  };
}

function processorOf({ memory_bytes_per_s, device_name }, { memories, copy_start_ns, launch_ns, stall_ns }) {
  const isNamed = ([pattern]) => new RegExp(`\\b(?:${pattern})\\b`).test(device_name.toLowerCase());
  const rate = memory_bytes_per_s ?? memories.find(isNamed)?.[1];
  if (!rate) return { copy_start_ns: 0, copy_ns_per_byte: 0, launch_ns: 0, stall_ns: 0 };
  return { copy_start_ns, copy_ns_per_byte: 2e9 / rate, launch_ns, stall_ns };
}

/** Throw an error of one line unless the document is a trace that the page can predict. */
function requireTrace(trace) {
  const parameters = trace?.workload?.parameters;
  if (trace?.schema_version !== 1 || !parameters?.length || !trace.ranks?.length) {
    throw new Error(
      "expected a trace as `ddplab record` writes it, or a file of torch's profiler, got " +
        `a document with ${Object.keys(trace ?? {}).slice(0, 4).join(", ") || "no fields"}`,
    );
  }
  const sparse = parameters.find((one) => one.sparse);
  if (sparse) throw new Error(`expected dense gradients, got a sparse one of ${sparse.name}; use \`ddplab predict\``);
  for (const { rank, iterations } of trace.ranks) {
    for (const [number, { ready_ns }] of iterations.entries()) {
      if (ready_ns.length !== parameters.length) {
        throw new Error(`rank ${rank}, iteration ${number}: expected ${parameters.length} ready times, got ${ready_ns.length}`);
      }
      const unused = ready_ns.indexOf(null);
      if (unused < 0) continue;
      const { name } = parameters[unused];
      throw new Error(`rank ${rank}, iteration ${number}: ${name} got no gradient; use \`ddplab predict\` for unused parameters`);
    }
  }
}
