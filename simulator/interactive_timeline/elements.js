// The elements of the widget: controls, table of results, picture, scrubber, buttons and legend.

const PATHS = [
  "stripe", "filling", "queued", "hidden", "exposed", "edge", "idle", "waiting", "forward", "backward", "copy",
  "late", "gradient", "curve", "axis", "cursor",
]; // later ones are drawn over earlier ones
const LEGEND = [
  ["forward", "forward pass, optimiser step"],
  ["backward", "backward pass"],
  ["copy", "copies and launches"],
  ["filling", "bucket fills"],
  ["queued", "full, waits for its turn"],
  ["hidden", "all-reduce, hidden behind computation"],
  ["exposed", "all-reduce, exposed: the slowest rank waits"],
  ["waiting", "rank waits for an all-reduce"],
  ["idle", "rank waits for the straggler"],
  ["gradient", "one gradient is ready"],
  ["late", "the same on the straggler"],
  ["curve", "bytes ready"],
];

/** JupyterLab takes the arrow keys for its own commands, except from elements with this attribute. */
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };

function createView(data) {
  const view = { controls: {}, buttons: {}, cells: {} };
  view.error = h("p", { class: "error", role: "alert" });
  view.status = h("p", { class: "status", role: "status" });
  view.result = h("p", { class: "result", role: "status", "aria-live": "polite" });
  view.about = h("p", { class: "about" });
  view.moment = h("p", { class: "moment" });
  view.svg = svg("svg", { "aria-hidden": "true", focusable: "false" });
  view.boundaries = h("div", { class: "boundaries", role: "group", "aria-label": "Bucket boundaries" });
  view.picture = h("div", { class: "picture" }, view.svg, view.boundaries);
  view.paths = Object.fromEntries(PATHS.map((name) => [name, svg("path", { class: name })]));
  view.labels = svg("g", {});
  view.svg.append(...Object.values(view.paths), view.labels);
  view.root = h(
    "section",
    { class: "ddplab-timeline", "aria-label": `Interactive timeline of ${data.title}` },
    controlsOf(data, view),
    h("div", { class: "numbers" }, resultTable(view), view.result),
    view.picture,
    scrubberOf(view),
    view.moment,
    buttonsOf(view),
    view.about,
    view.status,
    view.error,
    legend(),
  );
  return view;
}

function controlsOf(data, view) {
  const orders = data.orders.map((order) => h("option", { value: order }, order));
  view.controls.order = h("select", OWN_KEYS, ...orders);
  const range = (name, most, least = 0, step = 1) => {
    view.controls[name] = h("input", { type: "range", min: least, max: most, step, ...OWN_KEYS });
    view.controls[name].output = h("b", {});
    return view.controls[name];
  };
  // (An element `output` would take the label for itself.)
  const labelled = (words, input) => h("label", {}, h("span", {}, words, " ", input.output ?? ""), input);
  return h(
    "div",
    { class: "controls" },
    labelled("Bucket cap:", range("cap", data.caps.length - 1)),
    labelled("Order:", view.controls.order),
    labelled("Network:", range("gbit_per_s", data.gbit_per_s.length - 1)),
    labelled("World size:", range("world_size", data.world_sizes.length - 1)),
    labelled("Straggler:", range("factor", data.most_straggling, 1, 0.05)),
  );
}

const ROWS = [
  ["iteration_ns", "Iteration"],
  ["exposed_ns", "Exposed communication"],
  ["stragglers_ns", "Waiting for the straggler"],
  ["compute_ns", "Computation alone"],
];

function resultTable(view) {
  const head = ["", "now", "start layout", "change"].map((words) => h("th", { scope: "col" }, words));
  const rows = ROWS.map(([name, words]) => {
    const cells = ["now", "start", "difference"].map((column) => h("td", { class: column }));
    view.cells[name] = cells;
    return h("tr", { class: name }, h("th", { scope: "row" }, words), ...cells);
  });
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}

function scrubberOf(view) {
  const name = { "aria-label": "Moment in the iteration" };
  view.scrubber = h("input", { type: "range", min: 0, step: 100000, ...name, ...OWN_KEYS });
  view.play = h("button", { type: "button", class: "play", ...OWN_KEYS }, "Play");
  return h("div", { class: "scrubber" }, view.play, view.scrubber);
}

function buttonsOf(view) {
  const button = (name, words) => (view.buttons[name] = h("button", { type: "button", ...OWN_KEYS }, words));
  return h(
    "div",
    { class: "buttons" },
    button("split", "Split the largest bucket"),
    button("remove", "Remove the chosen boundary"),
    button("compare", "Compare with this layout"),
    button("restart", "Start again"),
  );
}

function legend() {
  const entry = ([name, words]) => {
    const lines = { gradient: "M7 2v10", late: "M7 2v10", curve: "M1 11h5v-8h7", queued: "M1 7h13" };
    const drawing = lines[name] ?? "M1 2h13v10h-13z";
    const sample = svg("svg", { width: 15, height: 14, "aria-hidden": "true" });
    sample.append(svg("path", { class: name, d: drawing }));
    return h("li", {}, sample, words);
  };
  return h("ul", { class: "legend" }, ...LEGEND.map(entry));
}

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
