// The elements of the widget: controls, table of results and buttons around the picture.

function createView(data) {
  const view = { controls: {}, buttons: {}, cells: {} };
  view.error = h("p", { class: "error", role: "alert" });
  view.status = h("p", { class: "status", role: "status" });
  view.result = h("p", { class: "result", role: "status", "aria-live": "polite" });
  view.about = h("p", { class: "about" });
  view.moment = h("p", { class: "moment" });
  view.root = h(
    "section",
    { class: "ddplab-timeline", "aria-label": `Interactive timeline of ${data.title}` },
    controlsOf(data, view),
    h("div", { class: "numbers" }, resultTable(view), view.result),
    pictureOf(view),
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

/** The iteration, and the parts that add up to it. A part that is `always` shown has a row also if it is 0. */
const ROWS = [
  ["iteration_ns", "Iteration", "always"],
  ["exposed_ns", "Exposed communication", "always"],
  ["computation_ns", "Computation", "always"],
  ["copies_ns", "Copies"],
  ["launches_ns", "Launches"],
  ["slowdown_ns", "Slow-down by collectives"],
  ["stragglers_ns", "Waiting for the straggler"],
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
