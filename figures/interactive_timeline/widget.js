// The widget: anywidget calls `render`, and the kernel answers every question with `simulator.predict`.

const PATIENCE_MS = 1000;

export function render({ model, el }) {
  const data = model.get("data");
  const layoutAt = ({ scene, cap }) => layoutOf(data.layouts[scene][cap]);
  const widget = Math.random().toString(36).slice(2); // the same one may be displayed twice
  let startLayout = layoutAt(data.start);
  let [asked, waiting, inFlight, count] = [{}, null, null, 0];
  el.classList.add("ddplab-timeline");
  el.innerHTML = MARKUP;
  const timeline = openTimeline(el, {
    ...data,
    layoutAt,
    dataOf: () => data,
    update: ask,
    namesOf: () => ["now", "start layout"],
    noteOn: () => null,
    settled: () => {},
  });
  const { view, state, frame } = timeline;
  const complain = debounced(() => setText(view.status, inFlight ? "Waiting for the kernel…" : ""), PATIENCE_MS);
  if (data.answer) {
    asked = { choices: state.choices, layout: state.layout, startLayout };
    receive(shownOf(data, state.layout), { answer: data.answer, start: data.answer });
  }
  view.compare.hidden = false;
  view.compare.addEventListener("click", () => {
    startLayout = state.layout;
    frame.request();
  });
  model.on("msg:custom", onReply);

  function ask({ choices, layout }) {
    if (choices === asked.choices && layout === asked.layout && startLayout === asked.startLayout) return;
    asked = { choices, layout, startLayout };
    const question = {
      ...{ plan: planOf(layout), start: planOf(startLayout), factor: choices.factor },
      world_size: Number(data.gpus[choices.gpus]),
      gbit_per_s: Number.parseFloat(data.gbit[choices.gbit]),
    };
    waiting = { question, answered: shownOf(data, layout) };
    sendNext();
    complain();
  }

  /** At most one question is in flight. Of those that come up meanwhile, only the newest is asked next. */
  function sendNext() {
    if (inFlight || !waiting) return;
    count += 1;
    inFlight = { ...waiting, id: `${widget}-${count}` };
    waiting = null;
    model.send({ id: inFlight.id, question: inFlight.question });
  }

  function onReply(reply) {
    if (reply.id !== inFlight?.id) return;
    const { answered } = inFlight;
    inFlight = null;
    receive(answered, reply);
    sendNext();
  }

  function receive(answered, { answer, start, error }) {
    setText(view.error, error ?? "");
    setText(view.status, "");
    if (answer) timeline.change({ answer, answered, baseline: start });
  }

  return () => {
    timeline.stop();
    complain.stop();
    model.off("msg:custom", onReply);
  };
}

export default { render };
