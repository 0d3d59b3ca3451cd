// The widget: anywidget calls `render`, and the kernel answers every question with `simulator.predict`.

const PATIENCE_MS = 1000;

export function render({ model, el }) {
  const data = model.get("data");
  const layoutAt = ({ scene, cap }) => layoutOf(data.layouts[scene][cap]);
  let startLayout = layoutAt(data.start);
  let asked = {};
  const asker = createAsker(model, receive);
  const owner = {
    ...data,
    layoutAt,
    dataOf: () => data,
    update: ask,
    namesOf: () => ["now", "start layout"],
    noteOn: () => null,
    settled: () => {},
  };
  el.classList.add("ddplab-timeline");
  el.innerHTML = MARKUP;
  const timeline = openTimeline(el, owner);
  const { view, state, frame } = timeline;
  const complain = debounced(() => setText(view.status, asker.isWaiting() ? "Waiting for the kernel…" : ""), PATIENCE_MS);
  if (data.answer) {
    asked = { choices: state.choices, layout: state.layout, startLayout };
    receive(shownOf(data, state.layout), { answer: data.answer, start: data.answer });
  }
  view.compare.hidden = false;
  view.compare.addEventListener("click", () => {
    startLayout = state.layout;
    frame.request();
  });

  function ask({ choices, layout }) {
    if (choices === asked.choices && layout === asked.layout && startLayout === asked.startLayout) return;
    asked = { choices, layout, startLayout };
    const conditions = {
      world_size: Number(data.gpus[choices.gpus]),
      gbit_per_s: Number.parseFloat(data.gbit[choices.gbit]),
      factor: choices.factor,
    };
    asker.ask({ plan: planOf(layout), start: planOf(startLayout), ...conditions }, shownOf(data, layout));
    complain();
  }

  function receive(answered, { answer, start, error }) {
    setText(view.error, error ?? "");
    setText(view.status, "");
    if (answer) timeline.change({ answer, answered, baseline: start });
  }

  return () => {
    timeline.stop();
    complain.stop();
    asker.stop();
  };
}

export default { render };

/**
 * Questions to the kernel: at most one is in flight. Of the questions that come up meanwhile, the newest is next.
 *
 * @param model anywidget's model; it answers on "msg:custom" with the `id` of the question.
 * @param receive called with the question's context and the reply.
 */
function createAsker(model, receive) {
  const asker = Math.random().toString(36).slice(2); // the same widget may be displayed twice
  let [waiting, inFlight, count] = [null, null, 0];
  const sendNext = () => {
    if (inFlight || !waiting) return;
    count += 1;
    inFlight = { ...waiting, id: `${asker}-${count}` };
    waiting = null;
    model.send({ id: inFlight.id, question: inFlight.question });
  };
  const onReply = (reply) => {
    if (reply.id !== inFlight?.id) return;
    const { context } = inFlight;
    inFlight = null;
    receive(context, reply);
    sendNext();
  };
  model.on("msg:custom", onReply);
  return {
    ask: (question, context) => {
      waiting = { question, context };
      sendNext();
    },
    isWaiting: () => inFlight !== null,
    stop: () => model.off("msg:custom", onReply),
  };
}
