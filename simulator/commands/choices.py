"""Choices of caps and orders that `ddplab predict` and `sweep` try beside a policy, and how a cap is written."""

import math
from typing import Annotated

import typer

from reference.bucketing import ORDERS, Order, cap_name

from ..checks import overruled
from ..iteration.policy import Policy
from .arguments import read_caps, read_orders

CAPS = "Bucket caps in MB, comma-separated; `single` means one single bucket, `default` DDP's own: 25, the first 1."
ChosenOrders = Annotated[
    str | None,
    typer.Option("--orders", help=f"Bucket orders, comma-separated: {', '.join(ORDERS)}.", show_default="ready"),
]


def choose_caps(text: str | None, policy: Policy, usual: str) -> list[float | None]:
    """Caps in MB, None for DDP's own; `usual` where nothing was asked for, one where the policy leaves no choice.

    Raises:
        ValueError: No cap, or one although the policy leaves no choice.
    """
    if _is_overruled("--caps", "bucket_cap_mb", text, policy):
        return [policy.bucket_cap_mb]
    words = (usual if text is None else text).split(",")
    return [None if word.strip() == "default" else read_caps(word)[0] for word in words]


def choose_orders(text: str | None, policy: Policy) -> list[Order]:
    """Names of orders, as `choose_caps`."""
    if _is_overruled("--orders", "order", text, policy):
        return [policy.order]
    return read_orders("ready" if text is None else text)


def cap_word(cap_mb: float | str | None) -> str:
    """For a person: in MB, `single` or `default`; a word stays as it is."""
    if isinstance(cap_mb, str):
        return cap_mb
    return "default" if cap_mb is None or math.isnan(cap_mb) else cap_name(cap_mb)


def cap_json(cap_mb: float | str | None) -> float | str | None:
    """For programs: in MB; as JSON has no infinity, a single bucket is null, and DDP's own cap the word `default`."""
    word = cap_word(cap_mb)
    return {"single": None, "default": word}.get(word, cap_mb)


def _is_overruled(option: str, axis: str, text: str | None, policy: Policy) -> bool:
    field = overruled(policy).get(axis)
    if field is not None and text is not None:
        raise ValueError(f"{option}: expected none beside --policy {field}=..., which leaves no choice; got {text!r}")
    return field is not None
