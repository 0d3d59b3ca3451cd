"""The manual: what `--help` says beside the options, and examples, whose options a test reads."""

from collections.abc import Mapping

USAGE = """\
Record data-parallel training, predict it under other buckets and networks, check the predictions.

\b
The usual order:
  record      when each gradient of a model is ready       -> trace.json.gz
  calibrate   what collectives cost on this machine         -> fabric.json
  predict     the iteration under other buckets, networks, world sizes
  validate    all of that, and then training for real, side by side

Without the machine: `synthesize` makes a trace from a data sheet, a fabric may be a YAML file of links or logs of
nccl-tests, `sweep` tries all combinations, `knobs` lists whatever can be asked.

A model is resnet50, resnet18, mlp, transformer, small-tensors or MODULE:CALLABLE; the callable returns
(model, loss_fn), and loss_fn(model) runs one batch and returns the loss. Sizes are in MB of 2**20 bytes.

Each command prints a table, takes --json PATH for programs, and ends with 0; with 1 and one line if something
is wrong that you can mend; with 2 if an option is.
"""

SUMMARIES: Mapping[str, str] = {
    "record": "When each gradient of a model is ready.",
    "synthesize": "A trace from a model and a data sheet; nothing runs.",
    "rescale": "A recorded trace, on another device.",
    "calibrate": "What collectives, copies and launches cost here.",
    "fabric": "What is known of a fabric: latency and bandwidth.",
    "predict": "The iteration under each bucket cap, order and hook.",
    "sweep": "All combinations, as a table and a heat map.",
    "knobs": "Everything that can be asked, with units and sources.",
    "validate": "Predict, then train for real, and compare.",
    "demo": "All of it for two models, in 5 to 7 minutes.",
}
"""By command, for the list of all."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "record": (
        "ddplab record --model resnet18 --out out/resnet18.json.gz",
        "ddplab record --model my_models:small --world-size 2 --iterations 20 --out out/small.json.gz",
    ),
    "synthesize": (
        "ddplab synthesize --model resnet50 --device a100-40gb-tf32 --out out/a100.json.gz",
        "ddplab synthesize --model resnet50 --device h100-tf32 --step-ms 95 --out out/h100.json.gz",
    ),
    "rescale": ("ddplab rescale out/a100.json.gz --model resnet50 --from a100-40gb-tf32 --to h100-tf32",),
    "calibrate": (
        "ddplab calibrate --model mlp --world-size 2 --out out/fabric.json",
        "ddplab calibrate --model mlp --hook fp16 --hook power_sgd:2 --link-rate 1gbit --out out/gbit.json",
    ),
    "fabric": (
        "ddplab fabric out/fabric.json",
        "ddplab fabric 8.log 16.log pod.yaml",
    ),
    "predict": (
        "ddplab predict trace.json.gz --fabric out/fabric.json --world-size 2 --caps 1,25,single",
        "ddplab predict trace.json.gz --fabric pod.yaml --world-size 64 --hooks none,fp16 --straggler 3:1.5",
        "ddplab predict trace.json.gz --fabric 8.log --fabric 16.log --world-size 16 --timeline out/timeline.png",
    ),
    "sweep": (
        "ddplab sweep trace.json.gz --fabric pod.yaml --world-sizes 8,64,512 --caps 1,5,25 --heat-map out/map.png",
    ),
    "knobs": ("ddplab knobs",),
    "validate": (
        "ddplab validate --model mlp --caps 1,25 --out out/mlp",
        "ddplab validate --model my_models:small --world-size 4 --hooks none,bf16 --link-rate 1gbit --out out/small",
    ),
    "demo": ("ddplab demo --out out/demo",),
}
"""By command."""


def epilog(command: str) -> str:
    """The examples of a command, as its help ends with them."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in EXAMPLES[command])
