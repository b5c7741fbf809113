"""The command line: parse, call, print."""

import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from semidfl.commands.words import flags as flags_of
from semidfl.config import Config, from_toml, full_path, help_of, leaves, override, to_toml
from semidfl.errors import ConfigError, SemiDFLError, Stopped, nearest
from semidfl.recipes import RECIPES, find_recipe
from semidfl.record.atomic import WORDS, explain

if TYPE_CHECKING:  # torch and the rest load only when a command needs them
    from semidfl.experiment import Result

__all__ = ["main"]

USAGE = """usage: semidfl COMMAND …

  demo                            labels only against SemiDFL on digits: two runs, a few minutes, no download
  run RECIPE [--field value …]    run an experiment: {recipes}, or a config file .toml
                                  --dry-run prints the config and what memory it needs; --overwrite replaces
                                  a run of the same name; --help lists all fields
  resume FOLDER                   go on with a run that was stopped; --engine and other fields of compute may change
  reproduce NAME [--option …]     a table or figure of the paper: runs what is missing, goes on where it was stopped;
                                  --help lists the names and options
  sweep RECIPE --field a,b,c …    search settings: grid, random or successive halving; --help lists the options
  compare RUN RUN … [--out DIR] [--format text|json]
                                  finished runs side by side: intervals, paired tests, and with --out the curves
  report RUN … [--out FILE]       one HTML file: result, curves, graph, confusion, images; default: RUN/report.html
  watch RUN_OR_FOLDER … [--port N] [--host ADDRESS]
                                  the live page of runs, while they go on and after; default: all in runs/
  bench WORKLOAD [--option …]     how fast this machine is, beside a plain loop; --help lists workloads and options
  data list [--format text|json]  the data sets and where they are
  data get NAME                   fetch a data set and verify it
  data check NAME_OR_PATH [--size N] [--channels N] [--classes A,B,…] [--test PERCENT] [--format text|json]
                                  what is in a data set, an .npz or a folder of images, and what is wrong with it;
                                  exit code 2 if something is
  predict RUN --input IMAGE_OR_FOLDER [--client N] [--format text|csv|json]
                                  class and probability of images, by the mean of the clients' models
  export RUN --format onnx|torchscript|safetensors [--client N] [--out FILE]
                                  a model for other programs, preprocessing inside, checked against the original
  generate RUN [--class NAME] [--n COUNT] [--client N] [--seed N] [--out FOLDER]
                                  images drawn by the generator that the clients share
  doctor [--port N] [--identity FOLDER] [--federation FILE] [--name PEER] [--format text|json]
                                  what this machine has and lacks: torch, GPU, memory, data, ports, neighbours
  completion bash|zsh|fish        lets the shell complete commands and options: see docs/quickstart.md
  local-federation --peers 5      real peers on this machine, each a process with its own certificate
  federation new FOLDER           the file and the certificates of a new federation
  identity init | issue | request | show    its authority, keys and certificates
  node --federation F --name A    run a peer; --help of each of these lists its options
  audit DIR [--format text|json]  what a peer has sent to whom
  version

Runs are written to runs/NAME."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    before = warnings.formatwarning
    # A warning is a line for the user, not for a programmer.
    warnings.formatwarning = lambda message, *_, **__: f"semidfl: {message}\n"
    try:
        return _dispatch(words)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except SemiDFLError as error:
        print(f"semidfl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `semidfl … | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("semidfl: stopped at once; what a run had kept in a checkpoint stands", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in WORDS:
            raise
        print(f"semidfl: {explain(error.filename, error)}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = before


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE.format(recipes=", ".join(RECIPES)))
        return 0
    if words[0] in ("version", "--version"):
        from semidfl import __version__

        print(f"semidfl {__version__}")
        return 0
    own = {"run", "reproduce", "sweep", "bench", *_PEERS} - {"audit"}
    if words[-1] in ("-h", "--help") and words[0] not in own:
        print(USAGE.format(recipes=", ".join(RECIPES)))
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(f"there is no command {words[0]!r}{nearest(words[0], COMMANDS)}; `semidfl help` lists them")
    return COMMANDS[words[0]](words[1:])


def _run(words: list[str]) -> int:
    flags = [w for w in words if w in ("--dry-run", "--overwrite", "--help", "-h")]
    if not words or "--help" in flags or "-h" in flags:
        print(_run_help())
        return 0
    if words[0].startswith("-"):
        raise ConfigError(f"the recipe comes first: semidfl run {'|'.join(RECIPES)}|FILE.toml {words[0]} …")
    values = _pairs([w for w in words[1:] if w not in flags])
    config = _config(words[0], values)
    if "--dry-run" in flags:
        from semidfl.estimate import estimate

        print(to_toml(config) + "\n" + estimate(config))
        return 0
    from semidfl.experiment import run

    return _done(run(config, overwrite="--overwrite" in flags))


def _config(recipe: str, values: dict[str, str]) -> Config:
    """A recipe (its own arguments first) or a config file, with overrides on top."""
    if recipe.endswith(".toml"):
        try:
            return override(from_toml(Path(recipe).read_text(encoding="utf-8")), values)
        except OSError as error:
            raise ConfigError(f"cannot read {recipe}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"cannot read {recipe}: it is not UTF-8 text") from None
    make, arguments = find_recipe(recipe)
    paths = {full_path(name): name for name in arguments}
    # Through a config first: so a recipe's arguments are checked and typed like any field.
    typed = dict(leaves(override(Config(), {path: v for path, v in values.items() if path in paths})))
    config = make(**{name: typed[path] for path, name in paths.items() if path in values})
    return override(config, {path: v for path, v in values.items() if path not in paths})


def _pairs(words: list[str]) -> dict[str, str]:
    """--field value, or --field=value, by the field's full path; a later one wins."""
    return {full_path(name): value for name, value in flags_of(words)}


def _run_help() -> str:
    lines = ["usage: semidfl run RECIPE [--field value …] [--dry-run] [--overwrite]", "", "recipes:"]
    for name, make in RECIPES.items():
        _, arguments = find_recipe(name)
        lines += [f"  {name} ({', '.join(arguments)})", f"      {(make.__doc__ or '').splitlines()[0]}"]
    lines += ["", "fields (a name that occurs once needs no section), with the defaults of `paper` on MNIST:"]
    helps = help_of()
    lines += [f"  --{path} {value!r}\n      {helps[path]}" for path, value in leaves(Config())]
    return "\n".join(lines)


def _resume(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        raise ConfigError("usage: semidfl resume FOLDER [--compute.field value …]")
    from semidfl.experiment import resume

    return _done(resume(words[0], values=_pairs(words[1:])))


def _done(result: "Result") -> int:
    s = result.summary
    print(f"accuracy {100 * s['accuracy']:.2f} ± {100 * s['std_over_clients']:.2f} % over the clients", end="")
    print(f" ({s['rounds']} rounds, {s['seconds']:.0f} s on {s['device']})")
    if "attackers" in s:
        print(f"accuracy {100 * s['honest_accuracy']:.2f} % over the honest; attackers: {s['attackers']}")
    print(f"run folder: {result.folder}")
    return 0


def _demo(words: list[str]) -> int:
    """Two runs on the same split: what the labels alone give, and what SemiDFL makes of the rest."""
    from semidfl.experiment import run

    values = _pairs(words)
    results = {}
    for method, title in (("dfl-lb", "labels only (DFL-LB)"), ("semidfl", "SemiDFL")):
        print(f"\n{title}: ten clients on a graph, two with labels, two with some, six with none")
        config = _config("demo", {"method": method} | values)
        config = replace(config, name=f"demo-{method}")
        results[title] = run(config, overwrite=True)
    print()
    for title, result in results.items():
        s = result.summary
        print(f"{title:22} {100 * s['accuracy']:6.2f} % ± {100 * s['std_over_clients']:.2f}   {s['seconds']:4.0f} s")
    low, high = (r.accuracy for r in results.values())
    print(f"{'gained without a label':22} {100 * (high - low):+6.2f} points")
    print(f"\nrun folder: {results['SemiDFL'].folder}")
    return 0


def _reproduce(words: list[str]) -> int:
    from semidfl.reproduce import HELP, options_of, reproduce

    if not words or words[-1] in ("-h", "--help"):
        print(HELP)
        return 0
    files = reproduce(words[0], options_of(flags_of(words[1:])), shlex.join(["semidfl", "reproduce", *words]))
    print("\n".join(f"written: {file}" for file in files))
    return 0


def _sweep(words: list[str]) -> int:
    from semidfl.sweep import HELP, sweep

    if not words or words[-1] in ("-h", "--help"):
        print(HELP)
        return 0
    if words[0].startswith("-"):
        raise ConfigError(f"the recipe comes first: semidfl sweep {'|'.join(RECIPES)}|FILE.toml {words[0]} …")
    files = sweep(partial(_config, words[0]), dict(flags_of(words[1:])))
    print("\n".join([files[0].read_text(encoding="utf-8"), *(f"written: {file}" for file in files)]))
    return 0


def _compare(words: list[str]) -> int:
    from semidfl.report.compare import compare, draw, gather, text_of, to_json

    first = next((k for k, word in enumerate(words) if word.startswith("--")), len(words))
    flags = dict(flags_of(words[first:]))
    if not words[:first] or set(flags) - {"out", "format"} or flags.get("format", "text") not in ("text", "json"):
        raise ConfigError("usage: semidfl compare RUN RUN … [--out DIR] [--format text|json]")
    groups = gather(words[:first])
    show = to_json if flags.get("format") == "json" else text_of
    print(show(compare(groups)))
    for file in draw(groups, Path(flags["out"])) if "out" in flags else []:
        print(f"written: {file}", file=sys.stderr)  # on stdout it would spoil the JSON
    return 0


def _bench(words: list[str]) -> int:
    from semidfl.bench import main as bench

    return bench(words)


def _report(words: list[str]) -> int:
    from semidfl.report.html import write_report

    first = next((k for k, word in enumerate(words) if word.startswith("--")), len(words))
    flags = dict(flags_of(words[first:]))
    if not words[:first] or set(flags) - {"out"}:
        raise ConfigError("usage: semidfl report RUN … [--out FILE]")
    default = Path(words[0]) / "report.html" if first == 1 else Path("report.html")
    print(f"written: {write_report(words[:first], Path(flags.get('out', default)))}")
    return 0


def _watch(words: list[str]) -> int:
    from semidfl.web.serve import options_of, watch

    first = next((k for k, word in enumerate(words) if word.startswith("--")), len(words))
    return watch(options_of(words[:first], dict(flags_of(words[first:]))))


def _later(module: str, function: str) -> Callable[[list[str]], int]:
    """A command that lives in a module of its own, loaded when it is called."""
    return lambda words: int(getattr(import_module(f"semidfl.commands.{module}"), function)(words))


def _peers(name: str) -> Callable[[list[str]], int]:
    def call(words: list[str]) -> int:
        from semidfl.node import commands
        from semidfl.node.extras import need_all

        need_all()
        found: Callable[[list[str]], int] = getattr(commands, name.replace("-", "_"))
        return found(words)

    return call


_PEERS = ("identity", "federation", "node", "local-federation", "audit")

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": _demo,
    "run": _run,
    "resume": _resume,
    "reproduce": _reproduce,
    "sweep": _sweep,
    "compare": _compare,
    "report": _report,
    "watch": _watch,
    "bench": _bench,
    "data": _later("data", "data"),
    "predict": _later("use", "predict"),
    "export": _later("use", "export"),
    "generate": _later("use", "generate"),
    "doctor": _later("doctor", "doctor"),
    "completion": _later("completion", "completion"),
    **{name: _peers(name) for name in _PEERS},
}
