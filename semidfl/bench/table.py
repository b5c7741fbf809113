"""A measured workload as a table to read."""

from collections.abc import Mapping
from typing import Any

__all__ = ["text_of"]


def text_of(result: Mapping[str, Any]) -> str:
    """The whole result."""
    versions = " ".join(f"{name} {version}" for name, version in result["versions"].items())
    peaks = ", ".join(f"{kind} {x:.3g} TFLOP/s" for kind, x in result["peak_tflops"].items())
    lines = [f"{result['workload']}: {result['what']}", f"{result['device']}, {result['threads']} threads; {versions}"]
    lines.append(f"peak measured here: {peaks}, memory {result['peak_gigabytes_per_s']:.3g} GB/s")
    for one in result["results"]:
        lines += ["", *_one(one)]
    return "\n".join(lines)


def _one(one: Mapping[str, Any]) -> list[str]:
    theirs = one.get("reference", {}).get("phases", {})
    lines = [f"{one['clients']} clients, {one['rounds_measured']} rounds measured", _HEAD]
    lines += [_row(phase, theirs.get(phase["phase"])) for phase in one["phases"]]
    lines.append(f"a round: {_seconds(one['seconds_per_round'])}" + _spread(one))
    if "cell_seconds" in one:
        lines.append(f"whole, start-up left out: {_seconds(one['cell_seconds'])}{_made_of(one)}")
    if "reference" in one:
        total = one["reference"].get("cell_seconds") or one["reference"]["seconds_per_round"]
        threads = one["reference"]["threads"]
        loop = f"plain loop, on {threads} thread{'s' * (threads > 1)}"
        lines.append(f"{loop}: {_seconds(total)}, so ours is {one['ratio']:.2f} times as fast")
    if "accuracy" in one:
        lines.append("accuracy: " + " ".join(f"{100 * a:.2f}" for a in one["accuracy"]) + " %")
    lines.append(f"start-up: {_seconds(one['startup_seconds'])}; peak memory {one['peak_memory_gib']:.2f} GiB")
    return lines


_HEAD = (
    f"{'phase':14}{'seconds':>10}{'loop':>10}{'samples/s':>12}{'TFLOP/s':>10}{'of peak':>9}{'roofline s':>12}"
    f"{'of roofline':>13}"
)


def _row(phase: Mapping[str, Any], theirs: float | None) -> str:
    row = f"{phase['phase']:14}{phase['seconds']:10.4f}" + (f"{theirs:10.4f}" if theirs is not None else " " * 10)
    if "tflops" not in phase:
        return row.rstrip()
    row += f"{phase['samples_per_s']:12,.0f}" if phase["samples"] else " " * 12
    row += f"{phase['tflops']:10.3g}{100 * phase['share_of_peak']:8.1f}%"
    return row + f"{phase['roofline_seconds']:12.2g}{100 * phase['share_of_roofline']:12.1f}%"


def _spread(one: Mapping[str, Any]) -> str:
    if "fastest_and_slowest" not in one:
        return ""
    low, high = one["fastest_and_slowest"]
    return f" (from {low:.4f} to {high:.4f}), {one['milliseconds_per_client']:.3f} ms a client"


def _made_of(one: Mapping[str, Any]) -> str:
    if "cell" not in one:
        return ""
    parts = [f"{x['count']} {name} x {x['seconds_each']:.4f}" for name, x in one["cell"].items() if x["count"]]
    return f" = {', '.join(parts)}"


def _seconds(x: float) -> str:
    return f"{x:.4f} s" if x < 10 else f"{x:.1f} s"
