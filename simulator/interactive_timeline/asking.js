// Questions to the kernel: at most one is in flight. Of the questions that come up meanwhile, only the newest of each
// purpose is asked next. The purpose is "now" for the layout that is shown and "start" for the one to compare with.

/**
 * @param model anywidget's model; it answers on "msg:custom" with the question's `id`, and `answer` or `error`.
 * @param receive called with the purpose, the question's context, and the reply.
 */
function createAsker(model, receive) {
  const asker = Math.random().toString(36).slice(2); // the same widget may be displayed twice
  const waiting = new Map();
  let inFlight = null;
  let asked = 0;

  function sendNext() {
    const purpose = ["now", "start"].find((name) => waiting.has(name));
    if (inFlight || !purpose) return;
    const { question, context } = waiting.get(purpose);
    waiting.delete(purpose);
    asked += 1;
    inFlight = { id: `${asker}-${asked}`, purpose, context };
    model.send({ id: inFlight.id, purpose, question });
  }

  function onReply(reply) {
    if (!inFlight || reply.id !== inFlight.id) return;
    const { purpose, context } = inFlight;
    inFlight = null;
    receive(purpose, context, reply);
    sendNext();
  }

  model.on("msg:custom", onReply);
  return {
    ask(purpose, question, context) {
      waiting.set(purpose, { question, context });
      sendNext();
    },
    isWaiting: () => inFlight !== null,
    stop: () => model.off("msg:custom", onReply),
  };
}
