// Scrubber: the moment that the cursor marks, moved by the reader, or by Next to where the next all-reduce starts or ends.

function connectScrubber(view, state, { frame }) {
  const moveTo = (cursor_ns) => {
    state.cursor_ns = cursor_ns;
    frame.request();
  };
  view.next.addEventListener("click", () => moveTo(nextEvent(state.answer, state.cursor_ns ?? 0)));
  view.scrubber.addEventListener("input", () => moveTo(Number(view.scrubber.value)));
}

/** The next moment at which an all-reduce starts or ends, or the iteration ends; after its end, its start. */
function nextEvent({ collectives, iteration_ns }, now) {
  const moments = [...collectives.flatMap(([, , start, done]) => [start, done]), iteration_ns];
  const later = moments.filter((moment) => moment > now);
  return later.length ? Math.min(...later) : 0;
}
