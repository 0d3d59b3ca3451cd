// Scrubber: the moment that the cursor marks, moved by the reader or by Play.

const PLAY_S = 8;

/** Play moves the cursor; for readers who want no motion, each click moves it to the next event. */
function connectScrubber(view, state, { frame }) {
  let playing = 0;
  const atRest = wantsNoMotion() ? "Next" : "Play";
  view.play.textContent = atRest;
  const moveTo = (cursor_ns) => {
    state.cursor_ns = cursor_ns;
    frame.request();
  };
  const stop = () => {
    cancelAnimationFrame(playing);
    playing = 0;
    view.play.textContent = atRest;
  };
  const play = () => {
    const begin = performance.now();
    const step = (now) => {
      const elapsed_s = Math.max(0, now - begin) / 1000; // a frame may have begun before the click
      const end = state.answer.iteration_ns;
      moveTo(Math.min(end, (end * elapsed_s) / PLAY_S));
      if (state.cursor_ns < end) playing = requestAnimationFrame(step);
      else stop();
    };
    view.play.textContent = "Stop";
    playing = requestAnimationFrame(step);
  };
  const next = () => moveTo(eventMoments(state.answer).find((moment) => moment > (state.cursor_ns ?? 0)) ?? 0);
  view.play.addEventListener("click", () => (playing ? stop() : wantsNoMotion() ? next() : play()));
  view.scrubber.addEventListener("input", () => {
    stop();
    moveTo(Number(view.scrubber.value));
  });
  return stop;
}

const wantsNoMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** The moments at which an all-reduce starts or ends, and the end of the iteration. */
function eventMoments(answer) {
  const moments = answer.collectives.flatMap(([, , start, done]) => [start, done]);
  return [...new Set([0, ...moments, answer.iteration_ns])].sort((a, b) => a - b);
}
