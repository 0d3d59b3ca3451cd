"""Cap curve: iteration time against the bucket cap, with torch's default, the best buckets and their lower bound."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from reference.bucketing import DEFAULT_BUCKET_CAP_MB

from ..plot_colours import COMPRESSION, COMPUTATION, EXPOSED, INK, SMALL

TICKS_MB = (0.01, 0.1, 0.25, 1, 5, 25, 100, 400, 1600)
MOST_LEVELS = 8.0
"""Height of the axes, as a multiple of the distance between the lowest and the highest line: a curve that rises more
leaves the axes, because the distances between the lines matter."""
LEAST_HEIGHT = 0.04
"""Height of the axes, as a fraction of the lower bound, if the lines are close together."""


def draw_cap_curve(
    by_cap_ns: Mapping[float, int],
    ax: Axes,
    *,
    best_cap_mb: float,
    default_ns: int,
    plan_ns: int,
    lower_bound_ns: int,
    is_list: bool,
    decimals: int = 1,
) -> Axes:
    """Draw the iteration time of each single cap as a curve, and other buckets as lines across the axes.

    Args:
        by_cap_ns: Predicted iteration time by bucket cap in MiB, in nanoseconds; all caps are finite.
        ax: The axes to draw on; returned.
        best_cap_mb: The cap to mark as the best one.
        default_ns: Iteration time with torch's default buckets.
        plan_ns: Iteration time with the plan.
        lower_bound_ns: A time that no buckets beat; the area below is grey.
        is_list: Whether a list of caps makes the plan.
        decimals: Decimals of milliseconds in the legend.
    """
    caps_mb = sorted(by_cap_ns)
    times_ms = [by_cap_ns[cap] / 1e6 for cap in caps_mb]
    best_ms = by_cap_ns[best_cap_mb] / 1e6
    bound_ms, plan_ms, default_ms = lower_bound_ns / 1e6, plan_ns / 1e6, default_ns / 1e6
    ax.plot(caps_mb, times_ms, ".-", color=COMPUTATION, markersize=4, linewidth=1.2, label="one cap for all buckets")
    ax.plot(
        best_cap_mb, best_ms, "*", color=COMPUTATION, markersize=11, markeredgecolor="white", zorder=4,
        label=f"best cap: {best_cap_mb:.3g} MB, {best_ms:.{decimals}f} ms",
    )  # fmt: skip
    ax.plot(
        DEFAULT_BUCKET_CAP_MB, default_ms, "D", color=EXPOSED, markersize=6, markeredgecolor="white", zorder=4,
        label=f"torch's default: {default_ms:.{decimals}f} ms",
    )  # fmt: skip
    plan = "plan, a list of caps" if is_list else "plan, no list of caps"
    ax.axhline(plan_ms, color=COMPRESSION, linewidth=1.2, linestyle="--", label=f"{plan}: {plan_ms:.{decimals}f} ms")
    ax.axhline(
        bound_ms,
        color=INK,
        linewidth=1.2,
        linestyle=":",
        label=f"bound that no buckets beat: {bound_ms:.{decimals}f} ms",
    )
    lines_ms = [default_ms, plan_ms, best_ms]
    height = max(MOST_LEVELS * (max(lines_ms) - bound_ms), LEAST_HEIGHT * bound_ms)
    top = bound_ms + min(height, 1.1 * max(max(times_ms + lines_ms) - bound_ms, LEAST_HEIGHT * bound_ms))
    bottom = bound_ms - 0.08 * (top - bound_ms)
    ax.axhspan(bottom, bound_ms, color=SMALL, zorder=0)
    ax.set_ylim(bottom, top)
    ax.set_xscale("log")
    low, high = min(caps_mb[0], DEFAULT_BUCKET_CAP_MB) / 1.2, max(caps_mb[-1], DEFAULT_BUCKET_CAP_MB) * 1.2
    ax.set_xlim(low, high)
    shown = [cap for cap in TICKS_MB if low <= cap <= high]
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticklabels([f"{cap:g}" for cap in shown])
    ax.set_xlabel("bucket cap, MB")
    ax.set_ylabel("iteration, ms")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    return ax
