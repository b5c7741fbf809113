"""`semidfl data`: what data sets there are, where, and what is in them."""

from pathlib import Path
from typing import TYPE_CHECKING

from semidfl.commands.words import as_json, parsed, table
from semidfl.config import Config, full_path, override
from semidfl.errors import DataError

if TYPE_CHECKING:
    from semidfl.data.check import FolderReport
    from semidfl.data.sources import Report

__all__ = ["data"]

_FORMATS = ("text", "json")
_USAGE = (
    "semidfl data list | get NAME | check NAME_OR_PATH "
    "[--size N] [--channels N] [--classes A,B,…] [--test PERCENT] [--seed N] [--format text|json]"
)
_LAYOUTS = {
    "classes": "a folder for each class",
    "csv": "images and labels.csv",
    "sites": "a folder for each site",
}


def data(words: list[str]) -> int:
    match words:
        case ["list", *rest]:
            return _list(parsed(rest, "semidfl data list [--format text|json]", 0, formats=_FORMATS)[1]["format"])
        case ["get", name]:
            from semidfl.data import sources

            print(f"{name} is verified, in {sources.get(name)}")
            return 0
        case ["check", name, *rest] if not name.startswith("-"):
            return _check(name, rest)
    raise DataError(f"usage: {_USAGE}")


def _list(form: str) -> int:
    from semidfl.data import sources

    found = sources.available()
    if form == "json":
        print(as_json(found))
        return 0
    for row in found:
        size = "x".join(map(str, row.shape))
        print(f"{row.name:14} {row.train:>6} + {row.test:>5} images  {size:8} {row.where}")
    return 0


def _check(name: str, rest: list[str]) -> int:
    from semidfl.data import sources
    from semidfl.data.check import check_folder

    given = parsed(rest, _USAGE, 0, ("size", "channels", "classes", "test", "seed"), _FORMATS)[1]
    form = given.pop("format")
    # Through a config: so every value is checked as in a run.
    config = override(Config(), {full_path(name): value for name, value in given.items()})
    if not sources.is_folder(name):
        report = sources.check(name)
        print(as_json(report) if form == "json" else _data_report(report))
        return 0
    found = check_folder(Path(name).expanduser(), config.data, config.seed)
    print(as_json(found) if form == "json" else _folder_report(found))
    return 0 if found.clean else 2


def _data_report(report: "Report") -> str:
    lines = [f"{report.name}: images {'x'.join(map(str, report.shape))}, {report.memory / 2**20:.1f} MiB in memory"]
    lines.append(f"{'class':14} {'training':>9} {'test':>9}")
    rows = zip(report.classes, report.train_counts, report.test_counts, strict=True)
    lines += [f"{name:14} {train:9} {test:9}" for name, train, test in rows]
    if report.unlabelled:
        lines.append(f"{'no label':14} {report.unlabelled:9} {0:9}")
    lines.append(f"{'all':14} {sum(report.train_counts) + report.unlabelled:9} {sum(report.test_counts):9}")
    return "\n".join(lines)


def _folder_report(r: "FolderReport") -> str:
    channels, height, width = r.shape
    kinds = sorted(r.sizes.items(), key=lambda item: -item[1])
    sizes = ", ".join(f"{count} of {size}" for size, count in kinds)
    if len(kinds) > 3:
        sizes = f"{sum(r.sizes.values())} in {len(kinds)} sizes, such as {kinds[0][0]} and {kinds[-1][0]}"
    worked = f"{width}x{height} {'grey' if channels == 1 else 'colour'}"
    rows = [*zip(r.classes, r.train_counts, r.test_counts, strict=True)]
    if r.unlabelled:
        rows.append(("(no label)", r.unlabelled, 0))
    rows.append(("all", sum(r.train_counts) + r.unlabelled, sum(r.test_counts)))
    blocks = [
        f"{r.name}: {_LAYOUTS[r.layout]}; images: {sizes or 'none'}\n"
        f"a run works on {worked}, {_bytes(r.memory)} in memory",
        table(("class", "training", "test"), rows, right=(1, 2)),
    ]
    if r.sites:
        sites = [(s.name, s.role, s.labelled, s.unlabelled) for s in r.sites]
        blocks.append(table(("site", "role", "labelled", "unlabelled"), sites, right=(2, 3)))
    if r.faults:
        blocks.append("\n".join(f"{fault.kind}: {fault.text}" for fault in r.faults))
    if r.usable:
        clients, graph = (len(r.sites), "full") if r.sites else (6, "ring")
        few = "" if r.unlabelled or r.sites else " --ratio 20"
        if few:
            blocks.append("every image has a label: a run keeps --ratio percent of them and hides the others")
        flags = f"--clients {clients} --topology {graph}{few}"
        blocks.append(f"next: semidfl run paper --dataset {r.name} {flags} --dry-run")
    else:
        blocks.append("a run would refuse this folder: mend what is marked `stop` first")
    return "\n\n".join(blocks)


def _bytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**19 else f"{size / 2**10:.0f} KiB"
