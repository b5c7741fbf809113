"""Trained classifiers for other programs (safetensors, ONNX, TorchScript), kept only if they answer as the original.

ONNX and TorchScript take uint8 (n, ch, H, W) of any size and give probabilities; safetensors holds the weights, and
its metadata the preprocessing in words and numbers.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semidfl.config import config_hash
from semidfl.data.dataset import Images
from semidfl.data.pictures import resize
from semidfl.errors import RunFolderError, SemiDFLError
from semidfl.record.atomic import explain, replacing
from semidfl.record.checkpoint import load_model, save_model
from semidfl.record.version import stamp
from semidfl.use.deploy import Deployed
from semidfl.use.model import Trained

__all__ = ["FORMATS", "export", "metadata"]

TOLERANCE = 1e-5
Answer = Callable[[Images], Any]
"""uint8 images (n, ch, H, W) -> probabilities (n, K)"""


def export(trained: Trained, form: str, path: Path) -> float:
    """Writes the file, reads it back, compares; returns the largest difference of any probability."""
    write, read = FORMATS[form][1:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temp:
            write(trained, temp)
            apart = _compare(trained, read(trained, temp))
            if not apart <= TOLERANCE:
                raise SemiDFLError(f"{path} is not kept: its answers are off by {apart:.2g} (at most {TOLERANCE:g})")
    except OSError as error:
        raise RunFolderError(explain(path, error)) from error
    return apart


def metadata(trained: Trained) -> dict[str, str]:
    """What a program needs to know of the model, as text."""
    space = trained.space
    return stamp(space) | {
        "classes": json.dumps(space.names or [str(k) for k in range(space.classes)], ensure_ascii=False),
        "input": f"image: uint8 (n, {space.channels}, height, width) of any size, "
        + ("grey" if space.channels == 1 else "RGB"),
        "output": f"probability: float32 (n, {space.classes})",
        "preprocessing": f"resize to {space.height}x{space.width} (triangle filter with antialiasing, stretched), "
        f"floor(x + 0.499), / 255, - {list(space.mean)}, / {list(space.std)}",
        "run": trained.config.name,
        "config": config_hash(trained.config),
        "weights": trained.whose,
    }


def _compare(trained: Trained, exported: Answer) -> float:
    """The largest difference over images of several sizes, one and many at a time, noise and smooth."""
    worst = 0.0
    for images in _probes(trained.space.shape):
        small = resize(images, trained.space.height, trained.space.width)
        own, other = trained.predict(torch.from_numpy(small)).cpu().numpy(), np.asarray(exported(images))
        worst = max(worst, float(np.abs(own - other).max()) if own.shape == other.shape else np.inf)
    return worst


def _probes(shape: tuple[int, int, int]) -> Iterator[Images]:
    channels, height, width = shape
    random = np.random.RandomState(0)
    for count, h, w in ((16, height, width), (1, height, width), (4, 2 * height + 1, 3 * width), (3, 5, 7)):
        yield random.randint(0, 256, (count, channels, h, w)).astype(np.uint8)
        ramp = np.linspace(0, 255, h)[:, None] * np.linspace(0, 1, w)
        yield np.broadcast_to(ramp.astype(np.uint8), (count, channels, h, w)).copy()


# --- safetensors -------------------------------------------------------------------------------------------


_HEAD = ("out.weight", "out.bias")
"""of either classifier: a row an output"""


def _write_safetensors(trained: Trained, path: Path) -> None:
    classes = trained.space.classes
    tensors = {
        name: x[0, :classes] if name in _HEAD else x[0]  # what follows served training alone (`classifier.turns`)
        for name, x in trained.classifier.named(trained.params).items()
    }
    save_model(path, tensors, metadata(trained))


def _read_safetensors(trained: Trained, path: Path) -> Answer:
    module, (tensors, _) = Deployed(trained), load_model(path)
    whole = module.network.state_dict()
    for name in _HEAD:
        tensors[name] = torch.cat([tensors[name], whole[name][0, len(tensors[name]) :]])
    missing = module.network.load_state_dict({name: x[None] for name, x in tensors.items()})
    assert not missing.missing_keys
    return lambda images: module(torch.from_numpy(images)).numpy()


# --- TorchScript -------------------------------------------------------------------------------------------


def _write_torchscript(trained: Trained, path: Path) -> None:
    with _quiet():
        traced = torch.jit.trace(Deployed(trained).eval(), (_example(trained),), check_trace=False)
        torch.jit.save(traced, str(path), _extra_files={"metadata.json": json.dumps(metadata(trained))})


def _read_torchscript(trained: Trained, path: Path) -> Answer:
    with _quiet():
        module = torch.jit.load(str(path))
    return lambda images: module(torch.from_numpy(images)).numpy()


# --- ONNX --------------------------------------------------------------------------------------------------


def _write_onnx(trained: Trained, path: Path) -> None:
    onnx = _need("onnx")
    _need("onnxscript")
    axes = {0: torch.export.Dim("n"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
    with _quiet():
        program = torch.onnx.export(
            Deployed(trained).eval(),
            (_example(trained),),
            input_names=["image"],
            output_names=["probability"],
            dynamic_shapes=(axes,),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, metadata(trained))
    path.write_bytes(model.SerializeToString())


def _read_onnx(trained: Trained, path: Path) -> Answer:
    session = _need("onnxruntime").InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return lambda images: session.run(["probability"], {"image": images})[0]


def _need(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise SemiDFLError(f"{module} is needed to export to ONNX: pip install 'semidfl[onnx]'") from None


def _example(trained: Trained) -> Tensor:
    """Of a size that no axis shares, so that none is taken for another or for a constant."""
    channels, height, width = trained.space.shape
    return torch.zeros(2, channels, height + 3, width + 5, dtype=torch.uint8)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters speak to their programmers, of packages that are not needed and functions that will go."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


FORMATS: dict[str, tuple[str, Callable[[Trained, Path], None], Callable[[Trained, Path], Answer]]] = {
    "safetensors": (".safetensors", _write_safetensors, _read_safetensors),
    "onnx": (".onnx", _write_onnx, _read_onnx),
    "torchscript": (".pt", _write_torchscript, _read_torchscript),
}
"""of each format: suffix, how to write, how to read back and answer"""
