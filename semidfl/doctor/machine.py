"""Python, torch, GPU, memory, disk, data, extras."""

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from semidfl.data import sources
from semidfl.doctor.finding import BAD, NOTE, OK, Finding

__all__ = ["look_at_machine"]

_GIB = 2**30
_TORCH = ((2, 11), (2, 14))
"""from, and below"""
_EXTRAS = {
    "report": ("tables, figures and reports", ("matplotlib", "jinja2", "scipy")),
    "onnx": ("`semidfl export --format onnx`", ("onnx", "onnxscript", "onnxruntime")),
    "web": ("`semidfl watch`", ("nicegui",)),
    "net": ("real peers", ("grpc", "msgspec", "cryptography")),
    "ray": ("a cluster", ("ray",)),
    "data": ("downloads from mirrors", ("pooch",)),
}


def look_at_machine(runs: Path) -> Iterator[Finding]:
    """Everything that needs no network; `runs` is the folder that runs go to."""
    yield _python()
    yield _torch()
    yield _gpu()
    yield _memory()
    yield from _disk(runs)
    yield _data()
    yield from _extras()


def _python() -> Finding:
    return Finding("Python", OK, f"{platform.python_version()}, {sys.executable}")  # an older one would not come so far


def _torch() -> Finding:
    import torch

    version = str(torch.__version__)
    low, high = _TORCH
    if low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        return Finding("torch", OK, f"{version}, {torch.get_num_threads()} threads on {os.cpu_count()} cores")
    tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    return Finding("torch", NOTE, version, f"tested with {tested}: pip install 'torch>={low[0]}.{low[1]}'")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        rows = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            rows.append(f"{torch.cuda.get_device_name(index)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free")
        return Finding("GPU", OK, "; ".join(rows))
    if shutil.which("nvidia-smi"):
        return Finding("GPU", NOTE, "there is one, but torch does not see it", "install a build of torch with CUDA")
    text = "none: the demo and small images train on the CPU in minutes, MNIST and larger want a GPU"
    return Finding("GPU", OK, text)


def _memory() -> Finding:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        meminfo = Path("/proc/meminfo")
        if meminfo.exists():  # counts what caches would give back, too
            rows = dict(line.split(":") for line in meminfo.read_text().splitlines())
            free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return Finding("memory", NOTE, "cannot be found out here")
    text = f"{free / _GIB:.1f} GiB free"
    if free < 2 * _GIB:
        return Finding("memory", NOTE, text, "close other programs; `semidfl run … --dry-run` tells what a run needs")
    return Finding("memory", OK, text)


def _disk(runs: Path) -> Iterator[Finding]:
    for what, folder in (("runs", runs), ("cache", sources.cache_folder())):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        text = f"{folder}: {free / _GIB:.1f} GiB free"
        if not _writable(there):
            yield Finding(what, BAD, f"{folder}: no permission to write in {there}", _elsewhere(what))
        elif free < _GIB:
            yield Finding(what, NOTE, text, "free some space: a run keeps its last two states and all models")
        else:
            yield Finding(what, OK, text)


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _elsewhere(what: str) -> str:
    if what == "cache":
        return "set SEMIDFL_DATA to a folder of yours"
    return "change to a folder of yours, or ask its owner for permission"


def _data() -> Finding:
    rows = sources.available()
    found = [row.name for row in rows if row.where != sources.NOT_FETCHED and Path(row.where).exists()]
    missing = [row.name for row in rows if row.name not in found]
    text = f"found: {', '.join(found) or 'none'}" + (f"; not yet: {', '.join(missing)}" if missing else "")
    return Finding("data", OK, text, f"`semidfl data get {missing[0]}` fetches one" if missing else "")


def _extras() -> Iterator[Finding]:
    for extra, (purpose, modules) in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            advice = f"for {purpose}: pip install 'semidfl[{extra}]'"
            yield Finding(f"extra {extra}", OK, f"not installed ({', '.join(missing)})", advice)
        else:
            yield Finding(f"extra {extra}", OK, "installed")
