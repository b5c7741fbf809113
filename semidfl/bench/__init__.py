"""`semidfl bench`: how fast a workload runs here, where the time goes, and how a plain loop does beside it.

`peers` and `ray` measure other things than a round on one device: they are modules of their own, with a `main(words)`.
"""

import json
from dataclasses import replace
from importlib import import_module

from semidfl.config import Config, full_path, override
from semidfl.errors import ConfigError

__all__ = ["main"]

HELP = """usage: semidfl bench WORKLOAD [--option …] [--field value …]

  --format text|json     a table, or all figures as JSON
  --rounds N             rounds to measure
  --whole                cells and sweeps: run to the end, instead of extrapolating from some rounds
  --authors              the authors' counts: 200 diffusion steps a round, a UNet of 1.4 GMAC at 28x28
  --no-reference         without the plain loop beside ours
  --reference-rounds N   rounds of the plain loop, where rounds are measured by themselves
  --clients N            only this many clients, where a workload has several sizes
  --field value          any field of the config, as in `semidfl run`

workloads:
{workloads}
"""

_OTHERS = {
    "peers": "what a round of ten peers on loopback costs beside its compute, and MB/s over mutual TLS",
    "ray": "1,000 clients on Ray beside the same in memory",
}
_FLAGS = ("--whole", "--authors", "--no-reference")


def main(words: list[str]) -> int:
    """The command; returns the exit code."""
    from semidfl.bench.workloads import WORKLOADS, find_workload

    if not words or words[0] in ("-h", "--help"):
        what = {name: w.what for name, w in WORKLOADS.items()} | _OTHERS
        rows = (f"  {name:16} {text}" for name, text in what.items())
        print(HELP.format(workloads="\n".join(rows)), end="")
        return 0
    if words[0] in _OTHERS:
        return int(import_module(f"{__name__}.{words[0]}").main(words[1:]))
    workload = find_workload(words[0])
    if words[-1] in ("-h", "--help"):
        print(HELP.format(workloads=f"  {words[0]:16} {workload.what}"), end="")
        return 0
    flags = {w for w in words[1:] if w in _FLAGS}
    values = _values([w for w in words[1:] if w not in flags])
    form = values.pop("format", "text")
    if form not in ("text", "json"):
        raise ConfigError(f"--format {form!r} is not legal: text or json")
    from semidfl.bench.measure import Asked, measure
    from semidfl.bench.table import text_of

    rounds = _count(values, "rounds", workload.rounds)
    theirs = _count(values, "reference_rounds", min(rounds, 5))
    asked = Asked(rounds, "--whole" in flags, "--no-reference" not in flags, theirs)
    configs = _configs(workload.make(), values, "--authors" in flags)
    result = measure(words[0], workload, configs, asked)
    result["command"] = " ".join(["semidfl bench", *words])
    print(json.dumps(result, indent=1) if form == "json" else text_of(result))
    return 0


def _values(words: list[str]) -> dict[str, str]:
    from semidfl.commands.words import flags

    return dict(flags(words))


def _count(values: dict[str, str], name: str, default: int) -> int:
    text = values.pop(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name.replace('_', '-')} {text!r} is not legal: a whole number, at least 1")
    return int(text)


def _configs(configs: list[Config], values: dict[str, str], authors: bool) -> list[Config]:
    from semidfl.bench.workloads import like_authors

    if "clients" in values and len(configs) > 1:
        wanted = values.pop("clients")
        sizes = [str(c.graph.clients) for c in configs]
        configs = [c for c in configs if str(c.graph.clients) == wanted]
        if not configs:
            raise ConfigError(f"--clients {wanted} is not legal here: one of {', '.join(dict.fromkeys(sizes))}")
    fields = {full_path(name): value for name, value in values.items()}
    configs = [override(like_authors(c) if authors else c, fields) for c in configs]
    return [replace(c, name=f"bench-{c.name}") for c in configs]
