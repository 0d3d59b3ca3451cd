"""The ladder: each solution passes its rung and fails the next, and common wrong answers are named."""

from pathlib import Path

import pytest

from ddplab.learn import solutions
from ddplab.learn.checks import ALL
from ddplab.learn.judge import Judge, likely_mistake
from ddplab.learn.learner_file import LearnerClass, learner_class, write_skeleton
from ddplab.learn.rungs import RUNGS
from reference import minimal
from reference.launch import RankPool

SOLUTIONS = Path(solutions.__file__)
MINIMAL = Path(minimal.__file__)
NUMBERS = range(1, len(RUNGS) + 1)
TITLES = [rung.title for rung in RUNGS]


@pytest.fixture(scope="module")
def judge(server):
    with RankPool(3, timeout_s=60.0) as ranks:
        yield Judge(ranks)


def edited(path: Path, name: str, *edits: tuple[str, str]) -> LearnerClass:
    """A class of a file of ours, in which each text was replaced by another one."""
    source = path.read_text().replace("from .bucketing", "from reference.bucketing")
    for old, new in edits:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    return LearnerClass(f"answer:{name}", "answer.py", source)


def solution(number: int, *edits: tuple[str, str]) -> LearnerClass:
    return edited(SOLUTIONS, RUNGS[number - 1].solution, *edits)


@pytest.mark.parametrize("number", NUMBERS, ids=TITLES)
def test_a_solution_passes_its_rung_and_fails_the_next(judge, number):
    own = judge.verdict(solution(number), number)
    assert own.passed, str(own)
    if number < len(RUNGS):
        assert not judge.verdict(solution(number), number + 1).passed


@pytest.mark.parametrize("number", [4, 9, 16])
def test_a_solution_passes_all_rungs_before(judge, number):
    for earlier in range(1, number):
        verdict = judge.verdict(solution(number), earlier)
        assert verdict.passed, str(verdict)


# Wrong answers

BROADCAST = "            dist.broadcast(tensor.detach(), group_src=0, group=process_group)"
DIVIDES = "                parameter.grad /= dist.get_world_size(self.process_group)"
REDUCES = "                dist.all_reduce(parameter.grad, group=self.process_group)"
FLAT_DIVIDES = "        flat /= dist.get_world_size(self.process_group)\n        return parameters"
WAITS = "        work.wait()\n        averages"
COPIES = "            self.gradient(parameter).copy_(average.view_as(parameter))"

WRONG = {
    "a sum in place of the average": (
        *(1, MINIMAL, "NaiveDataParallel", "a sum, not an average"),
        (DIVIDES, "                pass"),
    ),
    "divides by a number that is not the world size": (
        *(1, MINIMAL, "NaiveDataParallel", "divided by 2, not by the world size 3"),
        (DIVIDES, "                parameter.grad /= 2"),
    ),
    "divides twice": (
        *(1, MINIMAL, "NaiveDataParallel", "divided by the world size twice"),
        (DIVIDES, "                parameter.grad /= dist.get_world_size() ** 2"),
    ),
    "no broadcast at the start": (
        *(1, MINIMAL, "NaiveDataParallel", "do not start equal"),
        (BROADCAST, "            pass"),
    ),
    "only rank 0 gets the average": (
        *(1, MINIMAL, "NaiveDataParallel", "only rank 0 has the average"),
        (REDUCES, "                dist.reduce(parameter.grad, 0, group=self.process_group)"),
    ),
    "a broadcast in place of a sum": (
        *(1, MINIMAL, "NaiveDataParallel", "a broadcast copies"),
        (f"{DIVIDES}  # before the sum, which could overflow\n{REDUCES}",
         "                dist.broadcast(parameter.grad, 0)"),
    ),
    "leaves out the last parameter": (
        *(1, MINIMAL, "NaiveDataParallel", "the last parameter, left out"),
        ("        for parameter in self.trainable:\n            if parameter.grad is not None:",
         "        for parameter in self.trainable[:-1]:\n            if parameter.grad is not None:"),
    ),
    "one all-reduce for each gradient": (
        *(2, MINIMAL, "NaiveDataParallel", "copy the gradients into one flat tensor"),
    ),
    "never copies back": (
        *(2, MINIMAL, "FlatDataParallel", "nobody has averaged it"),
        (COPIES, "            pass"),
    ),
    "copies back in another order": (
        *(2, MINIMAL, "FlatDataParallel", "wrong shape or order"),
        ("zip(parameters, averages, strict=True)", "zip(reversed(parameters), averages, strict=True)"),
    ),
    "blocks in each launch": (
        *(3, SOLUTIONS, "Flat", "the launch blocks; pass async_op=True"),
    ),
    "forgets to wait": (
        *(3, SOLUTIONS, "Asynchronous", "nobody waits for it"),
        ("    def average_gradients(self) -> None:\n        \"\"\"Replace every gradient by its average over the ranks.\"\"\"",
         "    def finish(self, parameters, flat, work):\n        super().finish(parameters, flat, DoneWork())\n\n"
         "    def average_gradients(self) -> None:\n        \"\"\"Replace.\"\"\""),
        ("class Asynchronous(Flat):", "class DoneWork:\n    def wait(self):\n        pass\n\n\nclass Asynchronous(Flat):"),
    ),
    "launches at the end": (
        *(4, SOLUTIONS, "Hooked", "launch in the hook of the last gradient"),
        ("        self.missing.discard(parameter)\n        self.launch_complete()", "        pass"),
    ),
    "averages the parameter that the hook receives": (
        *(4, SOLUTIONS, "Hooked", "the hook's argument is the parameter, not its gradient"),
        ("        self.missing.discard(parameter)\n        self.launch_complete()",
         "        parameter.data /= dist.get_world_size()\n        dist.all_reduce(parameter.data)\n"
         "        self.waiting = []"),
    ),
    "reads the gradient before it is accumulated": (
        *(4, SOLUTIONS, "Hooked", "register_hook runs before the gradient is accumulated"),
        ("            parameter.register_post_accumulate_grad_hook(self.gradient_ready)",
         "            parameter.register_hook(lambda _, one=parameter: self.gradient_ready(one))"),
        ("    def launch_complete(self) -> None:\n        \"\"\"Launch the buckets whose gradients have all arrived.\"\"\"",
         "    def gradient(self, parameter):\n        return parameter.grad\n\n    def launch_complete(self) -> None:\n"
         "        \"\"\"Launch.\"\"\""),
    ),
    "never begins a second pass": (
        *(4, SOLUTIONS, "Hooked", "something is left of the pass before"),
        ("        if (this_pass := torch._C._current_graph_task_id()) != self.backward_pass:",
         "        this_pass = 0\n        if self.backward_pass:"),
    ),
    "forgets what is left when the pass ends": (
        *(5, SOLUTIONS, "Bucketed", "is the last bucket, or the last parameter, left out?"),
        ("        for in_flight in self.in_flight:\n            self.finish(*in_flight)\n        self.waiting",
         "        for in_flight in self.in_flight[:-1]:\n            self.finish(*in_flight)\n        self.waiting"),
    ),
    "fills buckets from the front": (
        *(6, SOLUTIONS, "Bucketed", "filled from the first layer on"),
    ),
    "launches what is complete": (
        *(7, SOLUTIONS, "Reversed", "launched as they become ready"),
    ),
    "rebuilds in its own ready order": (
        *(8, SOLUTIONS, "Rebuilt", "broadcast rank 0's"),
        ("            dist.broadcast(from_rank_0, group_src=0, group=self.process_group)\n", ""),
    ),
    "never rebuilds": (
        *(8, SOLUTIONS, "Ordered", "note the ready order of the first pass"),
    ),
    "copies in place of views": (
        *(9, SOLUTIONS, "Viewing", "copies of the averages, not views"),
        ("            parameter.grad = part\n        return flat",
         "            parameter.grad = part.clone()\n        return flat"),
        ("        if self.gradient_as_bucket_view:\n            work.wait()\n        else:\n            super().finish",
         "        if True:\n            super().finish"),
    ),
    "averages under no_sync": (
        *(10, SOLUTIONS, "Accumulating", "averaged inside no_sync"),
        ("        if self.synchronised:\n            super().gradient_ready", "        if True:\n            super().gradient_ready"),
    ),
    "the inner no_sync ends the outer one": (
        *(10, SOLUTIONS, "Accumulating", "restore the value before, not True"),
        ("            self.synchronised = before", "            self.synchronised = True"),
    ),
    "no_sync stays on after an exception": (
        *(10, SOLUTIONS, "Accumulating", "restore in finally"),
        ("        try:\n            yield\n        finally:\n            self.synchronised = before",
         "        yield\n        self.synchronised = before"),
    ),
    "keeps its own buffers": (
        *(11, SOLUTIONS, "Buffered", "broadcast rank 0's before the forward pass"),
        ("        if self.broadcast_buffers:\n            self.send_from(self.source(), self.module.buffers())", "        pass"),
    ),
    "makes zeros of what nobody used": (
        *(12, SOLUTIONS, "Searching", "must stay None"),
        ("            parameter.grad = self.kept[parameter]", "            pass"),
    ),
    "sends the map in every pass": (
        *(13, SOLUTIONS, "Static", "sent in every pass"),
        ("        if self.never_used is not None:\n            return self.never_used\n", ""),
    ),
    "divides before the hook": (
        *(14, SOLUTIONS, "Hookable", "divided by the world size twice"),
        ("        return HookResult(self.comm_hook(bucket), flat)",
         "        flat /= dist.get_world_size()\n        return HookResult(self.comm_hook(bucket), flat)"),
    ),
    "ignores what the hook returns": (
        *(14, SOLUTIONS, "Hookable", "copy it into the bucket"),
        ("        self.flat.copy_(self.future.wait())", "        self.future.wait()"),
    ),
    "sends its last gradients without inputs": (
        *(15, SOLUTIONS, "Joined", "must add zeros, not its last gradients"),
        ("        ddp.module.zero_grad()\n", ""),
    ),
    "ends with its own model": (
        *(15, SOLUTIONS, "Joined", "post_hook must broadcast"),
        ("        self.ddp.send_from(last, iter([*self.ddp.module.parameters(), *self.ddp.module.buffers()]))", "        del last"),
    ),
    "keeps the whole state": (
        *(16, SOLUTIONS, "Sharded", "every rank keeps the whole state"),
        ('optimizer_class([{"params": mine}], **settings)', "optimizer_class(self.trainable, **settings)"),
    ),
    "does not send the parameters": (
        *(16, SOLUTIONS, "Sharded", "the parameters are not sent after the step"),
        ("        optimizer.register_step_post_hook(share_parameters)\n", ""),
    ),
}  # fmt: skip
"""Rung, file, class, a part of the verdict, and the edits that make the answer wrong."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_named(judge, wrong):
    number, path, name, says, *edits = WRONG[wrong]
    verdict = judge.verdict(edited(path, name, *edits), number)
    assert not verdict.passed
    assert says in str(verdict)
