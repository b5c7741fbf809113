"""Picture files of any size and mode as one array of bytes: decoded in parallel, in the order given, kept in the cache.

Resizing is two small matrix products in double precision, the triangle filter that Pillow calls BILINEAR. It is
plain arithmetic, so that an exported model can carry the very same steps inside (`use/deploy.py`), and rounds to
the same bytes.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from semidfl.data.dataset import Images
from semidfl.record.atomic import replacing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "SUFFIXES",
    "Look",
    "Shape",
    "decode",
    "decode_all",
    "look",
    "read_pictures",
    "resize",
    "shape_for",
    "weights",
]

SUFFIXES = frozenset(".png .jpg .jpeg .bmp .gif .tif .tiff .webp .pgm .ppm .pbm .pnm".split())
T = TypeVar("T")
Shape = tuple[int, int, int]
"""channels, height, width"""

ROUND = 0.499
"""Added before rounding down: a tie, which the last bit of a sum would decide, always goes down."""
_LARGEST_KEPT, _USUAL = 64, 32
_GREY = frozenset("1 L LA La I I;16 I;16L I;16B I;16N".split())
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_EXIF_ORIENTATION = 0x0112
_FORMAT = 1  # of the cache


@dataclass(frozen=True)
class Look:
    """What a file's header says."""

    height: int
    width: int
    grey: bool


@dataclass(frozen=True)
class Pixels:
    """The pictures that could be read, and why the others could not."""

    images: Images
    """(n, ch, H, W)"""
    good: tuple[int, ...]
    """the place of each in the list that was asked for"""
    failures: dict[int, str]
    """of the others: place -> reason"""
    sizes: dict[str, int]
    """how many had which size before resizing"""


def look(path: Path) -> Look | str:
    """Size and kind of a picture from its header alone, or why it cannot be read."""

    def header(image: "Image") -> Look:
        width, height = image.size
        if image.getexif().get(_EXIF_ORIENTATION) in _TURNED:
            width, height = height, width
        return Look(height, width, image.mode in _GREY)

    return _opened(path, header)


def decode(path: Path, shape: Shape) -> Images | str:
    """A picture as (ch, H, W) in the shape asked for, or why it cannot be read."""
    channels, height, width = shape
    return _opened(path, lambda image: resize(_bytes(image, channels), height, width))


def _opened(path: Path, work: "Callable[[Image], T]") -> T | str:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return work(image)
    except FileNotFoundError:
        return "there is no such file"
    except PermissionError:
        return "no permission to read it"
    except Exception as error:  # what decoders make of damaged bytes is not foreseeable
        text = " ".join(str(error).split()).replace(f" '{path}'", "")
        return text or type(error).__name__


def _bytes(image: "Image", channels: int) -> Images:
    """(ch, H, W) of any mode: upright, transparent parts black, 16 bits a pixel brought to 8."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError(
            "its pixels are floating-point numbers, of which the range is not known: save it as 8 or 16 bit"
        )
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("its pixels do not fit 16 bits: save it as 8 or 16 bit")
        image = Image.fromarray((values // 257).astype(np.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        solid = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", solid.size, "black"), solid)
    plain = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return plain[None] if channels == 1 else np.ascontiguousarray(plain.transpose(2, 0, 1))


def resize(pixels: Images, height: int, width: int) -> Images:
    """(…, H, W) -> (…, height, width): stretched where the proportions differ, so that nothing is cut off."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    down, across = weights(pixels.shape[-2], height), weights(pixels.shape[-1], width)
    return np.floor(down @ pixels.astype(np.float64) @ across.T + ROUND).astype(np.uint8)


@lru_cache(maxsize=256)
def weights(old: int, new: int) -> npt.NDArray[np.float64]:
    """(new, old): what each old pixel gives to each new one, a triangle as wide as a new pixel, at least an old one."""
    scale = old / new
    centre = (np.arange(new) + 0.5) * scale - 0.5
    distance = np.abs(np.arange(old) - centre[:, None]) / max(scale, 1.0)
    share = np.maximum(1 - distance, 0.0)
    found: npt.NDArray[np.float64] = share / share.sum(1, keepdims=True)
    return found


def shape_for(looks: Sequence[Look], size: int | tuple[int, int], channels: int) -> Shape:
    """The shape that all pictures get: a side, or height and width; 0 means: what suits them."""
    channels = channels or (1 if all(one.grey for one in looks) else 3)
    if size:
        return channels, *((size, size) if isinstance(size, int) else size)
    sizes = {(one.height, one.width) for one in looks}
    if len(sizes) == 1:
        height, width = sizes.pop()
        if min(height, width) >= 4 and max(height, width) <= _LARGEST_KEPT:
            return channels, height, width
    return channels, _USUAL, _USUAL


def read_pictures(
    paths: Sequence[Path], size: int | tuple[int, int], channels: int, cache: Path | None = None
) -> Pixels:
    """All pictures in one shape; those that cannot be read are left out and named.

    With `cache`, what was decoded is kept in this file and used again until any of the pictures changes.
    """
    key = _key(paths, size, channels)
    if cache is not None and (kept := _recall(cache, key)) is not None:
        return kept
    with _workers() as pool:
        looks = list(pool.map(look, paths))
        seen = {place: one for place, one in enumerate(looks) if isinstance(one, Look)}
        shape = shape_for(list(seen.values()), size, channels)
        some = pool.map(partial(decode, shape=shape), [paths[i] for i in seen])
        decoded = dict(zip(seen, some, strict=True))
    good = {place: one for place, one in decoded.items() if not isinstance(one, str)}
    failures = {place: str(decoded.get(place, one)) for place, one in enumerate(looks) if place not in good}
    sizes: dict[str, int] = {}
    for place in good:
        name = f"{seen[place].width}x{seen[place].height} {'grey' if seen[place].grey else 'colour'}"
        sizes[name] = sizes.get(name, 0) + 1
    images = np.stack(list(good.values())) if good else np.zeros((0, *shape), np.uint8)
    found = Pixels(images, tuple(good), failures, sizes)
    if cache is not None:
        _keep(cache, key, found)
    return found


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """A thread a core: decoders and matrix products let others run meanwhile."""
    try:
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        alone = threadpool_limits(1, "blas")  # else each thread's products would start threads of their own
    except ImportError:
        alone = nullcontext()
    with alone, warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # of odd metadata, which do no harm
        yield pool


def decode_all(paths: Sequence[Path], shape: Shape) -> list[Images | str]:
    """Each picture in the shape asked for, or why it cannot be read."""
    with _workers() as pool:
        return list(pool.map(partial(decode, shape=shape), paths))


# --- the cache ---------------------------------------------------------------------------------------------


def _key(paths: Sequence[Path], size: int | tuple[int, int], channels: int) -> str:
    """Changes with any name, time or length of the files and with what is asked for."""
    digest = hashlib.sha256(json.dumps([_FORMAT, size, channels]).encode())
    for path in paths:
        try:
            stat = path.stat()
            digest.update(f"{path}\0{stat.st_mtime_ns}\0{stat.st_size}\n".encode(errors="surrogateescape"))
        except OSError as error:
            digest.update(f"{path}\0{error.errno}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _recall(cache: Path, key: str) -> Pixels | None:
    try:
        with np.load(cache, allow_pickle=False) as kept:
            about = json.loads(str(kept["about"]))
            if about["key"] != key:
                return None
            failures = {int(place): reason for place, reason in about["failures"].items()}
            return Pixels(kept["images"], tuple(about["good"]), failures, about["sizes"])
    except Exception:  # missing, or damaged in whatever way: it is made anew
        return None


def _keep(cache: Path, key: str, found: Pixels) -> None:
    about = {"key": key, "good": found.good, "failures": found.failures, "sizes": found.sizes}
    with suppress(OSError):  # a cache that cannot be written is none
        cache.parent.parent.mkdir(parents=True, exist_ok=True)
        cache.parent.mkdir(mode=0o700, exist_ok=True)  # private images stay with their owner
        with replacing(cache) as temp, temp.open("wb") as file:
            np.savez(file, images=found.images, about=np.array(json.dumps(about)))
