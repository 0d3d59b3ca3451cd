// The answer to a dropped profile, in one picture: the step of today, and that of more GPUs on three networks.

const FORECAST_GPUS = [2, 8, 64];
const FORECAST_GBIT_PER_S = [10, 100, 400];

/** The recorded iteration of median duration of the first rank, and one row for each network and number of GPUs. */
function forecastOf(model, caps, scene) {
  const [recorded] = model.ranks;
  const total = ({ backward_end_ns, exposed_ns, step_ns }) => backward_end_ns + exposed_ns + step_ns;
  const step = upperMedian(recorded, total);
  const layouts = caps.map((cap) => layoutOfScene(scene, model, cap));
  const rows = FORECAST_GBIT_PER_S.flatMap((gbit_per_s) =>
    FORECAST_GPUS.map((world_size) => {
      const conditions = { ...scene, gbit_per_s, world_size, factor: 1 };
      const answers = layouts.map((layout) => replay(model, planOf(layout), conditions));
      const cap = answers.indexOf(longestOf(answers, ({ iteration_ns }) => -iteration_ns));
      return { gbit_per_s, world_size, cap, ...answers[cap] };
    }),
  );
  return { step: { ...step, iteration_ns: total(step) }, rows };
}

/**
 * What training with AdamW has in use on a GPU, as memory_use of simulator/capacity/memory.py computes it. `known_bytes`
 * are parameters, their gradients in buckets, and states of the optimiser; the upper end is null without activations.
 */
function memoryUse({ sizes_bytes, buffer_bytes, memory, gib }, costs) {
  const size = sum(sizes_bytes);
  const kept = size + buffer_bytes + costs.states * size + costs.workspace_bytes;
  const steps = (1 + costs.temporaries) * size;
  const inputs = (memory?.frozen_bytes ?? 0) + (memory?.batch_bytes ?? 0);
  const peak = memory && kept + size + inputs + Math.max(memory.peak_with_gradients_bytes, steps);
  let [low, high] = [-1, 1].map((sign, end) => {
    const tensors = (peak ?? kept) * (1 + sign * costs.count_error) * costs.fragments[end];
    return roundToEven(tensors) + costs.context_bytes[end];
  });
  const capacity = Math.floor(costs.usable * gib * 2 ** 30) || null;
  const known_bytes = (2 + costs.states) * size + buffer_bytes;
  low = Math.max(low, known_bytes + size + (memory?.frozen_bytes ?? 0) + costs.context_bytes[0]);
  let answer = "unknown";
  if (capacity && low > capacity) answer = "does not fit";
  else if (capacity && peak && high <= capacity) answer = "fits";
  return { known_bytes, band_bytes: [low, peak ? high : null], capacity, answer };
}

function memoryInWords(model, costs) {
  const { known_bytes, band_bytes, capacity, answer } = memoryUse(model, costs);
  const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(1)} GB`;
  const offers = capacity ? `${model.device} offers ${gigabytes(capacity)}` : `the memory of ${model.device} is not known`;
  if (band_bytes[1]) return `Fits? ${answer}: with AdamW ${band_bytes.map(gigabytes).join(" to ")} in use; ${offers}.`;
  const known = `Parameters, gradients in buckets and the states of AdamW take ${gigabytes(known_bytes)}; ${offers}.`;
  if (answer !== "unknown") return `Fits? ${answer}. ${known}`;
  const ran = model.ran && model.communicates ? "with its batch it ran there, data parallel" : "activations are not in the file";
  return `Fits? ${model.ran && model.communicates ? "yes" : answer}: ${ran}. ${known}`;
}

/** Fill the dialog: `addressAt` has the address of the timeline to which a row leads. */
function drawForecast(view, model, { step, rows }, { caps, costs, addressAt }) {
  const longest = Math.max(step.iteration_ns, ...rows.map(({ iteration_ns }) => iteration_ns));
  const row = (head, parts, ...words) => {
    const pieces = parts.map(([name, ns]) => h("i", { class: name, style: `width: ${(100 * ns) / longest}%` }));
    const bar = h("td", { class: "bar" }, h("div", {}, ...pieces));
    return h("tr", {}, h("th", { scope: "row" }, head), bar, ...words.map((one) => h("td", {}, one)));
  };
  const backward_ns = step.backward_end_ns - step.forward_ns;
  const recorded = [["forward", step.forward_ns], ["computation", backward_ns], ["exposed", step.exposed_ns], ["forward", step.step_ns]];
  const predicted = rows.flatMap((one, number) => {
    const { computation_ns, copies_ns, launches_ns, exposed_ns } = one.parts;
    const parts = [["computation", computation_ns], ["copies", copies_ns + launches_ns], ["exposed", exposed_ns]];
    const link = h("a", { href: addressAt(one) }, `${one.world_size} GPUs`);
    const drawn = row(link, parts, tenths(one.iteration_ns), tenths(exposed_ns), caps[one.cap].name);
    const network = h("tr", {}, h("th", { scope: "rowgroup", colspan: 5 }, `${one.gbit_per_s} Gbit/s for each GPU`));
    return number % FORECAST_GPUS.length ? [drawn] : [network, drawn];
  });
  setText(view.forecastTitle, `${model.title} on ${model.device}`);
  view.forecastRows.replaceChildren(row("your step", recorded, tenths(step.iteration_ns), tenths(step.exposed_ns), ""), ...predicted);
  setText(view.memory, memoryInWords(model, costs));
}
