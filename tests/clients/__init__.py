"""Real clients of data-parallel classes: `make test-clients`."""

_held: list[object] = []


def import_torchvision() -> None:
    """Import torchvision, also one that was built for another torch: the models need none of its operators."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")
        _held.append(operators)  # they would go with it
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
