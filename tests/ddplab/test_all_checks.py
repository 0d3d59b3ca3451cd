"""The checks of conformance: correct classes pass, and each faulty class fails the check for its fault."""

import re
from itertools import combinations
from itertools import pairwise as pairwise_steps
from pathlib import Path

import pytest
from hypothesis import given

from ddplab.conformance import check_runner, lost_ranks
from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_outcomes import PLAIN
from ddplab.conformance.check_runner import MILDER, OF_ADAPTERS
from ddplab.conformance.random_programs import programs
from ddplab.conformance.training_programs import in_whole_steps
from ddplab.conformance.usual_scripts import SITUATIONS, pairwise, peak_memory
from ddplab.conformance.usual_scripts import TORCHS as TORCHS_SUBJECT

from ..foreign.run import HEAD, all_adapters, label
from ..reference.torch_suite.run import has_version_of_table
from ..torch_options import takes
from .conformance_bench import OURS, SLOW, TORCHS, faulty, outcomes

LADDER = "ddplab.learn.solutions:Buffered"
LOCAL = "gradients that nothing waits for"
FUNCTIONS = ["bucket caps", "accumulation", "random programs"]


@pytest.mark.skipif(
    has_version_of_table(), reason="test_readme judges torch's class by this kit with the pinned torch"
)
def test_torchs_passes_everything_that_it_supports(bench_of):
    """Ours passes `make test-reducer`, which CI runs."""
    bench = bench_of(TORCHS, against=TORCHS)
    found = outcomes(bench)
    failed = {one.check: one.message for one in found.values() if one.outcome == "failed"}
    if not takes(["forward_sync_buffers"]):  # torch 2.11: a second forward pass
        assert "modified by an inplace operation" in failed.pop("repeated forward passes")  # changes what one saved
    known = {"a backward pass that raises", "first pass of a static graph", "missing sparse gradients"}
    assert set(failed) == {LOCAL, *known}
    assert {found[check].level for check in failed} == {"should"}
    assert {one.check for one in found.values() if one.outcome == "not supported"} == {
        *("plans", "mixed precision", "gradients of another dtype"),
    }


def test_a_simple_class_passes_and_what_it_lacks_is_no_failure(bench_of):
    """Those of `ddplab.reference.minimal` have their own tests, which run the checks that are left out here.

    An operator's error for sparse gradients is a milder failure: the class does not refuse them.
    """
    left_out = {*SLOW, *PLAIN, "a backward pass that raises", LOCAL}
    found = outcomes(bench_of(LADDER), [name for name in CHECKS if name not in left_out])
    failed = {one.check: (one.level, one.message) for one in found.values() if one.outcome == "failed"}
    assert [*failed] == ["sparse gradients"]
    level, message = failed["sparse gradients"]
    assert level == "should"
    assert re.fullmatch(
        r"sparse embedding: RuntimeError: reshape .* \(.*solutions.py, line \d+\); the class refuses this .*", message
    )
    lacking = {one.check for one in found.values() if one.outcome == "not supported"}
    assert "comm hooks" in lacking
    assert "accumulation" not in lacking


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("DoesNotWait", "any timing", "gradient of"),
        ("LaunchesAsReady", "any timing", "expected its collective"),
        (
            "SkipsZeros",
            "any timing",
            "ranks [4] have ended; with ones in gradients of zeros, all ranks go on: does a rank skip what is zero?",
        ),
        ("Sums", "one weight", "iteration 0, rank 0: gradient of 'w0': 2 times the expected value"),
        ("KeepsItsLastBucket", "bucket caps", "gradient of 'w0'"),
        ("OnlyRankZeroIsRight", "one weight", "rank 1: gradient of 'w0': 0.5 times the expected value"),
        ("StartsUnequal", "construction", "on rank 1 is not that of rank 0"),
        ("CopiesOutInMemoryOrder", "special parameters", "elements differ"),
        ("CopiesOutInMemoryOrder", "kept gradients", "elements differ"),
        ("NeverSendsBuffers", "construction", "buffer 'samples' on rank 1 is not that of rank 0"),
        ("NeverSendsBuffers", "buffers", "iteration 0, rank 1: the buffer 'of_bool' is not that of rank 0"),
        ("EndsAtAnyBackwardPass", "several backward passes", "autograd.grad of the inputs first: iteration 0"),
        ("CopyStaysLocal", "several modules", "a deep copy is trained on its own rank only, although"),
        ("AveragesInTrainingModeOnly", "accumulation", "gradient of"),
        ("DividesAfterTheSum", "half-precision sums", "half-precision gradient 0 of 4 elements, 40000 on this rank"),
        ("SkipsSubclasses", "special parameters", "parameters of a subclass of Tensor: iteration 0"),
        ("KeepsBucketsOfAFailedPass", "a backward pass that raises", "an error after the last gradient on ranks"),
        ("AveragesFiftyTimes", "a long run", "iteration 50, rank 0: gradient of 'layers.0.weight'"),
        ("KeepsEveryBucket", "a long run", "is every bucket kept?"),
        ("KeepsHooks", "a long run", "is a hook or output kept?"),
        ("SendsBuffersOfTheTop", "buffers", "rank 1: the buffer '0.count' is not that of rank 0"),
        (
            "StopsAtNone",
            "unused parameters",
            "a parameter that no rank uses comes first: iteration 0, rank 0",
        ),
        ("CallsForwardItself", "use as the module", "it does not call the module's forward hook"),
        ("AlwaysTrains", "use as the module", "its modes changed at construction"),
        ("ClearsGradients", "use as the module", "a gradient from before its construction changed"),
        ("KeepsItsMode", "use as the module", "eval() does not reach the module"),
        ("EnablesGradients", "use as the module", "under no_grad, its output requires a gradient"),
        ("LoadsNothing", "use as the module", "load_state_dict() does not load what state_dict() returned"),
        ("NamesLikeTheModule", "use as the module", "as a part of another module, its state dict has other names"),
        ("DetachesInputs", "use as the module", "its forward gets other inputs than the script gives"),
        ("RebuildsInputs", "use as the module", "its forward gets other inputs than the script gives"),
        ("RebuildsOutputs", "use as the module", "the script gets another output than its forward returns"),
        ("CastsOutputs", "use as the module", "the script gets another output than its forward returns"),
        ("HooksEveryOutput", "use as the module", "cannot register a hook on a tensor that doesn't require gradient"),
        ("SearchesListsOnly", "use as the module", "forward returns a dict: iteration 0"),
        ("IsUsedInside", "use as the module", "after a forward pass that raised an error: iteration 0"),
        ("ReplacesForward", "use as the module", "a deep copy of the module computes with the module's own param"),
        ("StartsInSinglePrecision", "use as the module", "parameters in double precision differ between the ranks"),
        ("ReturnsNothing", "use as the module", "eval() does not return it"),
        ("ClearsItsBuckets", "use as the module", "zero_grad() does not clear the gradients"),
        (
            "AsksInEachForward",
            "use as the module",
            "rank 0 cannot evaluate a module without buffers, or accumulate, alone: ",
        ),
        (
            "CountsLocalPasses",
            "use as the module",
            "rank 0 cannot evaluate a module without buffers, or accumulate, al",
        ),
        (
            "CountsForwardPasses",
            "use as the module",
            "rank 0 cannot evaluate a module without buffers, or accumulate",
        ),
        ("SwitchesGradientsOn", "use as the module", "a forward pass under no_grad ends it"),
        ("ChangesInputs", "use as the module", "an input of the script requires a gradient afterwards"),
        ("SeedsNumpy", "construction", "ranks with seeds of their own draw equal random numbers"),
        ("StartsFromASum", "construction", "parameter 'w0' of rank 0 changed: 3 of 3 elements differ; got nan"),
        ("AddsUpZeros", "buffers", "rank 0: the buffer 'of_bfloat16' is not that of rank 0"),
        ("AveragesOnePassOfAGraph", LOCAL, "a second backward pass through a graph"),
        ("RoundsItsOrder", "real models", "more weights than bfloat16 counts: rank"),
        ("CountsItsBucketsOnce", "comm hooks", "expected the bucket launched last to be the last one, got [(0, "),
        (
            "KeepsFutures",
            "comm hooks",
            "hook that multiplies by 1, rank 0: 8 futures of hooks live on, with their results",
        ),
        ("NamesFormerParameters", "comm hooks", "a bucket's gradients have the shapes"),
        (
            "OneHookForAll",
            "comm hooks",
            "'lstm.weight_ih_l0': 0.25 times the expected value, because the hook of another module was called",
        ),
        ("KeepsEvaluations", "a long run", "is a hook or output kept?"),
        ("SeedsPython", "construction", "ranks with seeds of their own draw equal random numbers"),
        ("SendsCopiesOfBuffers", "buffers", "rank 1: the buffer '0.count' is not that of rank 0"),
        ("ReplacesBuffers", "buffers", "iteration 0, rank 0: the buffer 'of_bool' got new memory; expected values"),
        ("SendsChangedBuffers", "buffers", "slow or hung"),
        ("NeedsBuffers", "buffers", "AttributeError: 'NoneType' object has no attribute 'detach'"),
        ("SendsHalfPrecision", "special values", "gradient 0 in torch.bfloat16: 1 of 4 elements differ; got inf"),
        ("CountsInAByte", "a long run", "iteration 255, rank 0"),
        ("OneSwitchForAll", "nested no_sync", "a module beside another one under no_sync: iteration 0"),
        ("NeedsASecondRank", "any timing", "in virtual time, on 1 rank: rank 0 failed"),
        ("KeepsItsFirstStateDict", "what training leaves behind", "was it kept from the first?"),
        ("LeavesNoSyncOpen", "nested no_sync", "after an exception inside of no_sync: iteration 0"),
        ("KeepsAThread", "a failing rank", "its process did not end: does a thread keep it that is no daemon?"),
        ("SendsOneMebibyte", "large gradients", "a bucket of 10 MiB: iteration 0, rank 0"),
        ("LosesTheLastPiece", "large gradients", "a bucket of 10 MiB: iteration 0, rank 0"),
        (
            "SendsBuffersInTraining",
            "buffers",
            "in eval mode, iteration 1, rank 1: the buffer 'of_bool' is not that of",
        ),
        ("RoundsBuffers", "buffers", "buffer of 'large': 5 of 6 elements differ; got 46116860184273879"),
        ("SeparatesParameters", "special parameters", "parameters that shared one piece of memory now have 6"),
        ("RemovesHooks", "hooks of the script", "iteration 0, rank 0: gradient of '0.weight'"),
        ("StartsAgainInForward", "checkpoints", "activation checkpoints with use_reentrant=False: iteration 0"),
        ("WrongOnSevenRanks", "any timing", "on 7 ranks: iteration 0, rank 0: gradient of 'w0': 0.5 times"),
        ("WrongOnFourRanks", "any timing", "on 4 ranks: iteration 0, rank 0: gradient of 'w0': 0.5 times"),
        ("WaitsForTheLastPiece", "any timing", "with seed 5 in virtual time"),
        ("SeedsInForward", "construction", "ranks with seeds of their own draw equal random numbers"),
        ("NoSyncAtCall", "nested no_sync", "iteration 0, rank 0: gradient of '0.weight'"),
        ("DropsKeywords", "repeated forward passes", "missing 1 required keyword-only argument: 'factor'"),
        ("RingOfHandles", "bucket caps", "gradient of 'w"),
        ("BucketsAreParameters", "one weight", "parameter of 'w0'"),
        ("InTheOrderOfASet", "new interpreters", "so that their sets have other orders"),
        ("LocalAfterNoSync", "first pass of a static graph", "the first pass of a static graph: under no_sync: it"),
        ("RetriesLocally", "a backward pass that raises", "an error before the first gradient"),
        ("RebuildsWhenLayersFreeze", "unused parameters", "rank"),  # Gloo raises an error or ends the process
        ("GradientsOfForward", "bucket caps", "iteration 1, rank 0: gradient of 'w0'"),
        ("ForgetsUsesUnderNoSync", "combined options", "parameters that some ranks do not use with accumulation: it"),
        ("DropsImaginaryParts", "real models", "complex weights: iteration 0, rank 0: gradient of 'first.weight'"),
        ("RoundsToItsParameters", "gradients of another dtype", "iteration 0, rank 0: gradient of 'low.weight'"),
        ("SendsNumbersOnly", "buffers", "iteration 0, rank 1: the buffer 'of_bool' is not that of rank 0"),
        ("WalksByRecursion", "deep models", "maximum recursion depth exceeded"),
        ("WalksEveryWay", "deep models", "slow or hung: ranks [0, 1] were still running"),
        ("LosesWhatFitsExactly", "bucket caps", "iteration 0, rank 0: gradient of 'w0'"),
        ("KnowsParametersByTheirMemory", "special parameters", "parameters that share memory, or did so at first: "),
        (
            "KnowsParametersByTheirAddress",
            "special parameters",
            "parameters that overlap in memory: iteration 0, rank 0: gradient of 'third'",
        ),
        ("DividesByItsCap", "bucket caps", "ZeroDivisionError"),
        ("MakesAGroupOfItsOwn", "process group", "slow or hung: ranks [0, 1] were still running"),
        (
            "StaysInLowPrecision",
            "mixed precision",
            "iteration 0 and evaluation: '0.weight' or its gradient is no float32",
        ),
        ("HalvesUnderNoSync", "nested no_sync", "iteration 0, rank 0: gradient of '0.weight'"),
        ("RefusesToFinish", "any timing", "NotImplementedError: backward is not supported"),
        ("RefusesToFinish", "combined options", "a plain model: NotImplementedError: backward is not supported"),
        ("CountsWholeNodes", "any timing", "on 2 ranks: iteration 0, rank 0: gradient of 'w0': 0.666667 times"),
        ("CountsUsesInBytes", "any timing", "on 256 ranks: "),
        ("SeedsInBackward", "what training leaves behind", "ranks with seeds of their own draw equal random numbers"),
        ("KeepsItsGraph", "what training leaves behind", "its graph is kept alive after its backward pass"),
        ("KeepsWhereItSearched", "what training leaves behind", "with find_unused_parameters, iteration 0, rank"),
        ("RegistersItsBuckets", "what training leaves behind", "the state dict has bucket beside the module's own"),
        ("KeepsCopies", "peak memory", "at its peak, training takes "),
        ("LocalIfCompiled", "compiled modules", "gradient of '0.weight': got None, expected a tensor"),
        ("MemoryOfTheFirstForward", "optimizers", "Inplace update to inference tensor"),
        ("KnowsOneThread", "several backward passes", "a backward pass in another thread: rank"),
        ("IgnoresByPrefix", "ignored parameters", "iteration 0, rank 0: gradient of 'ignored.bias2'"),
        ("ReturnsViews", "use as the module", "is a view and is being modified inplace"),
        ("ClearsWhatItAverages", "use as the module", "zero_grad() does not clear the gradients"),
        (
            "SendsComplexAsReal",
            "special parameters",
            "conjugate and negative views as gradients: RuntimeError: view_as_real",
        ),
        ("GathersEqualSparse", "sparse gradients", "sparse embedding: rank"),
        ("ClearsAllForOne", "gradient views", "iteration 2, rank 0: gradient of 'w0'"),
        ("DropsImaginaryPartsOfViews", "real models", "complex weights: iteration 0, rank 0: gradient of"),
        ("SendsBuffersOfTheStart", "buffers", "iteration 2, rank 1: the buffer 'grows' is not that of rank 0"),
        ("GivesCopiesToHooks", "comm hooks", "a bucket's gradients are not the parts of its buffer"),
        ("ForgetsUsesInEvaluation", "unused parameters", "iteration 2, rank 0: gradient of 'block1.block.w1'"),
        ("JoinsWithoutItsHook", "combined options", "a comm hook with uneven inputs: slow or hung: ranks [0, 1]"),
        ("CountsForwardsInside", "buffers", "after a forward pass that raised an error, iteration 3, rank 1: "),
        (
            "GivesUpWaiting",
            "any timing",
            "with seed -1 in virtual time, on 2 ranks, where each collective takes a year",
        ),
        (
            "HooksFloat32",
            "combined options",
            "a comm hook with two dtypes: iteration 0, rank 0: gradient of 'heads.1.",
        ),
        (
            "EndsNoSyncInEvaluation",
            "nested no_sync",
            "after no_sync or evaluation inside, the outer one averaged",
        ),
        ("ForgetsUsesWhenSaved", "combined options", "parameters that some ranks do not use with accumulation: it"),
        ("SendsIgnoredBuffers", "ignored parameters", "rank 1: construction overwrote 'count', which the module"),
        ("HooksOnce", LOCAL, "a module wrapped again after a layer was unfrozen"),
        (
            "RoundsWhatIsConverted",
            LOCAL,
            "a layer unfrozen after construction, a module converted after construction",
        ),
        (
            "HidesErrorsOfHooks",
            "comm hooks",
            "the future of a comm hook holds an error, but the backward pass raised none",
        ),
        ("JoinsOnce", "uneven inputs", "(1, 2) batches, then Join again: rank"),
        (
            "CountsUsesTooEarly",
            "untouched gradients",
            "got None, expected a tensor; this rank has made one: was it taken for unused before the pass ended?",
        ),
        (
            "SendsWhatMemoryHeld",
            "uneven inputs",
            "(2, 0) batches, iteration 0, rank 0: gradient of 'layers.0.weight'",
        ),
        ("KeepsUses", "untouched gradients", "iteration 1, rank 0: gradient 1, to which no rank adds: "),
        ("GivesNothingToUnused", "combined options", "expected a tensor: 1 of 2 ranks have one"),
        ("LosesGradientsInTheRebuild", "gradient views", "iteration 1, rank 0: gradient of 'w0'"),
    ],
)
def test_a_faulty_class_fails_where_its_fault_is(bench_of, monkeypatch, name, check, says):
    monkeypatch.setattr(check_runner, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(lost_ranks, "PATIENCE_S", 1.0)
    monkeypatch.setattr(lost_ranks, "COLLECTIVES_S", 1.0)
    result = outcomes(bench_of(faulty(name)), [check])[check]
    assert result.outcome == "failed"
    assert says in result.message


def test_state_of_a_class_is_named_and_does_not_reach_later_checks(bench_of):
    found = outcomes(bench_of(faulty("KeepsHandlesInItsClass")), ["any timing", "one weight"])
    assert "class attribute handles is state that the ranks, here threads, share" in found["any timing"].message
    assert found["one weight"].outcome == "passed"


def test_the_peak_of_memory_does_not_depend_on_when_a_backend_lets_go(two_ranks):
    """A thread of Gloo kept what was sent at construction in one training of twenty."""
    assert len({peak for _ in range(6) for peak in two_ranks.run(peak_memory, TORCHS_SUBJECT)}) == 1


@pytest.mark.parametrize(
    ("name", "checks", "lacking"),
    [
        (faulty("get_ddp_bucketed"), FUNCTIONS, {"accumulation"}),
        (faulty("make_ddp"), FUNCTIONS, {"accumulation"}),
        (faulty("ScattersAndGathers"), ["any timing", "overlap"], set()),
        (faulty("WaitsForFiveSeconds"), ["any timing", "overlap"], set()),
        (faulty("Hierarchical"), ["any timing", "bucket caps", "process group"], {"process group"}),
        (faulty("ReducesAndBroadcasts"), ["any timing", "overlap"], set()),
        (faulty("SendsAround"), ["any timing", "overlap", "real models"], {"overlap"}),
        (faulty("Coalesces"), ["any timing", "one weight", "random programs"], set()),
        (faulty("SharesMemory"), ["any timing", "real models"], {"any timing"}),
        (faulty("HasAHook"), ["process group"], set()),
        (faulty("AsksInEachForward"), ["any timing", "overlap", "optimizers"], set()),
        ("ddplab.reference.minimal:FlatDataParallel", ["a backward pass that raises"], set()),
    ],
)
def test_an_unusual_class_or_a_function_that_wraps_a_module_does_not_fail(bench_of, name, checks, lacking):
    found = outcomes(bench_of(name), checks)
    assert {one.check: one.message for one in found.values() if one.outcome == "failed"} == {}
    assert {one.check for one in found.values() if one.outcome == "not supported"} == lacking


@pytest.mark.parametrize(
    ("name", "check", "outcome", "says"),
    [
        (OURS, LOCAL, "passed", "warns or raises an error: a backward pass inside of forward, two forward passes"),
        (TORCHS, LOCAL, "failed", "gradients are no averages, in silence: two forward passes, then a backward"),
        (LADDER, LOCAL, "failed", "gradients are no averages, in silence: a layer unfrozen after construction"),
        (OURS, "buffers", "passed", "broadcast in each forward pass that follows a synchronised one"),
        (TORCHS, "buffers", "passed", "broadcast in each forward pass that follows a synchronised one"),
        (LADDER, "buffers", "passed", "broadcast in synchronised forward passes"),
        (
            faulty("HasAHook"),
            "comm hooks",
            "not supported",
            "it refuses register_comm_hook: RuntimeError: register_comm_hook or register_builtin_comm_hook can only",
        ),
        (
            faulty("TakesNoHook"),
            "compressing hooks",
            "not supported",
            "it refuses register_comm_hook: NotImplementedError: comm hooks come in the next version",
        ),
        (
            faulty("RefusesSparse"),
            "sparse gradients",
            "not supported",
            "it refuses them: NotImplementedError: s",
        ),
        (
            faulty("CrashesForSparse"),
            "sparse gradients",
            "failed",
            "sparse embedding: rank 0 failed: AttributeError: 'Cras",
        ),
        (
            "ddplab.learn.solutions:Hooked",
            "unused parameters",
            "not supported",
            "it has no find_unused_parameters",
        ),
        (
            faulty("CallsACrashARefusal"),
            "sparse gradients",
            "failed",
            "sparse embedding: rank 0 failed: RuntimeError: sparse",
        ),
        (faulty("CrashesInItsHook"), "comm hooks", "failed", "rank 0 failed: AttributeError: 'CrashesInItsHook'"),
        (faulty("SwapsHookAndState"), "comm hooks", "failed", "rank 0 failed: TypeError: Communication hook must be"),
        (faulty("AnnotatesItsHook"), "comm hooks", "failed", "rank 0 failed: ValueError: Communication hook: return"),
    ],
)
def test_the_report_says_what_a_class_does_where_classes_differ(bench_of, name, check, outcome, says):
    result = outcomes(bench_of(name), [check])[check]
    assert (result.outcome, re.sub(r"rank \d failed", "rank 0 failed", result.message)[: len(says)]) == (
        outcome,
        says,
    )


def test_an_adapter_is_compared_after_its_step(bench_of):
    found = outcomes(bench_of("tests.faulty_adapters:sharding"), CHECKS)
    lacking = {"accumulation", "unused parameters"}
    assert {one.check for one in found.values() if one.outcome == "passed"} == {*OF_ADAPTERS} - lacking
    assert {one.outcome for name, one in found.items() if name not in OF_ADAPTERS} == {"not supported"}


@pytest.mark.parametrize(
    ("name", "check", "outcome", "says"),
    [
        ("sums", "one weight", "failed", "iteration 0, rank 0: parameter of 'w0': "),
        ("sends_all_but_the_last", "any timing", "failed", "parameter of 'block1.block.w1': "),
        ("forgets_its_state", "one weight", "failed", "iteration 1, rank 0: parameter of 'w0': "),
        ("forgets_its_state", "real models", "failed", "iteration 1, rank "),
        ("updates_with_its_own", "one weight", "failed", "iteration 0, rank 0: parameter of 'w0': "),
        (
            "refuses_doubles",
            "special parameters",
            "passed",
            "refuses float64 parameters: ValueError: expected one dtype",
        ),
        ("refuses_ties", "special parameters", "passed", "refuses tied parameters: ValueError: expected parameters"),
        ("refuses_ties", "real models", "passed", "refuses shared layers: ValueError: expected parameters"),
        ("refuses_ties", "random programs", "passed", ""),
        ("sends_as_ready", "any timing", "failed", "each rank sends in its own ready order"),
        (
            "hangs_for_other_orders",
            "any timing",
            "failed",
            "each rank sends in its own ready order",
        ),
        (
            "refuses_all",
            "special parameters",
            "not supported",
            "it refuses float64 parameters: ValueError: expected another",
        ),
        ("ranks_round_differently", "real models", "failed", "parameters differ between the ranks"),
        ("skips_nan_alone", "special values", "failed", "NaN in a gradient of rank 0, after which all ranks"),
        ("looks_for_nan_in_its_share", "special values", "failed", "NaN in a gradient of rank 0, after which all"),
        ("seeds_all_ranks_alike", "construction", "failed", "draw equal random numbers"),
        ("decays_frozen_parameters", "real models", "failed", "convolutions and a frozen norm: iteration 0, rank "),
        ("sends_in_single_precision", "special parameters", "failed", "float64 parameters: iteration 0, rank "),
        ("averages_in_single_precision", "special parameters", "failed", "float64 parameters: iteration "),
        ("keeps_master_weights", "use as the module", "failed", "load_state_dict of a changed state_dict"),
        ("reads_the_learning_rate_once", "use as the module", "failed", "a lr that changes after each step"),
        ("has_one_learning_rate", "use as the module", "failed", "a param_group of one parameter, and another lr"),
        ("has_one_weight_decay", "use as the module", "failed", "a param_group of one parameter, and another lr"),
        ("pairs_groups_by_position", "use as the module", "failed", "a param_group of one parameter, and another lr"),
        ("decays_apart_from_the_momentum", "real models", "failed", "SGD with nesterov and weight_decay: iteration "),
        ("averages_parameters", "real models", "failed", "multi-layer perceptron: iteration 0, rank "),
        ("rotates_its_shares", "one weight", "failed", "iteration 1, rank 0: parameter of 'w0': "),
        ("divides_before_and_after", "new interpreters", "failed", "on 5 ranks, of which 3 are new interpreters"),
        ("hides_its_module", "optimizers", "failed", "eval() of the wrapped module does not reach the module"),
        ("clears_in_forward", "several backward passes", "failed", "evaluation between forward, backward and step"),
        ("keeps_the_last_pass", "several backward passes", "failed", "a second batch before the step: iteration "),
        ("leaves_out_what_is_frozen", LOCAL, "failed", "in silence: a layer unfrozen after construction"),
        ("decays_what_is_frozen_later", "use as the module", "failed", "a layer frozen after the first step: iterat"),
        ("repeats_the_last_step", "use as the module", "failed", "a step without a backward pass, after which all"),
        (
            "refuses_frozen_layers",
            "use as the module",
            "passed",
            "refuses a layer frozen after the first step: RuntimeError: expected a gradient of ",
        ),
        (
            "keeps_cleared_gradients",
            "several backward passes",
            "failed",
            "gradients cleared after a pass: iteration ",
        ),
    ],
)
def test_a_fault_of_an_adapter_is_found(bench_of, monkeypatch, name, check, outcome, says):
    monkeypatch.setattr(check_runner, "TIMEOUT_S", 5.0)
    result = outcomes(bench_of(f"tests.faulty_adapters:{name}"), [check])[check]
    assert (result.outcome, result.level) == (outcome, "should" if check in MILDER else "must")
    assert says in result.message


def test_after_the_ready_order_has_been_told_an_adapter_passes_the_other_checks(bench_of):
    names = ["any timing", "optimizers", "random programs"]
    found = outcomes(bench_of("tests.faulty_adapters:sends_as_ready"), names)
    assert [found[name].outcome for name in names] == ["failed", "passed", "passed"]


@given(programs(2, kinds=("train", "accumulate", "evaluate", "change_lr")))
def test_a_program_for_adapters_clears_gradients_after_each_averaged_step_and_only_then(program):
    steps = [step for step in in_whole_steps(program).steps if step.kind != "evaluate"]
    assert [step.kind for step in steps] == [one.kind for one in program.steps if one.kind in ("train", "accumulate")]
    for before, step in pairwise_steps(steps):
        assert (step.zero == "none") == (before.kind == "train")


@pytest.mark.parametrize("names", [tuple(SITUATIONS), tuple("abcdefghijklmno")])
def test_each_two_situations_occur_together_apart_in_both_ways_and_absent(names):
    rows = pairwise(names)
    for one, other in combinations(names, 2):
        assert len({(one in row, other in row) for row in rows}) == 4


def test_the_guide_names_every_check():
    guide = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", guide.partition("## The checks")[2].partition("\n## ")[0], re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == set(CHECKS)


def test_the_guide_has_a_row_for_each_foreign_implementation():
    guide = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    rows = guide.partition(HEAD)[2].partition("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(map(label, all_adapters().values()))
    assert len(rows) >= 10
