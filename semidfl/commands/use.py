"""`semidfl predict`, `export` and `generate`: the models of a finished run put to use."""

import csv
import sys
from pathlib import Path

from semidfl.commands.words import as_json, parsed, table, whole_number
from semidfl.errors import ConfigError, DataError

__all__ = ["export", "generate", "predict"]


def _client(given: dict[str, str]) -> int | None:
    return whole_number(given, "client", 0) if "client" in given else None


def predict(words: list[str]) -> int:
    usage = "semidfl predict RUN --input IMAGE_OR_FOLDER [--client N] [--format text|csv|json]"
    (run,), given = parsed(words, usage, 1, ("input", "client"), ("text", "csv", "json"))
    if "input" not in given:
        raise ConfigError(f"--input is missing: an image or a folder of images; usage: {usage}")
    from semidfl.use.model import load_classifier
    from semidfl.use.predict import pictures_of
    from semidfl.use.predict import predict as answers

    trained = load_classifier(Path(run), _client(given))
    found = list(answers(trained, pictures_of(Path(given["input"]).expanduser())))
    good = [one for one in found if not one.error]
    if not good:
        raise DataError(f"{found[0].file} cannot be read ({found[0].error}): give another image")
    for one in found:
        if one.error:
            print(f"semidfl: {one.file} cannot be read and is skipped ({one.error})", file=sys.stderr)
    rows = [(one.file, one.label, f"{one.probability:.4f}") for one in good]
    if given["format"] == "json":
        print(as_json(found))
    elif given["format"] == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([("file", "class", "probability"), *rows])
    else:
        print(table(("file", "class", "probability"), rows, right=(2,)))
    return 0


def export(words: list[str]) -> int:
    usage = "semidfl export RUN --format onnx|torchscript|safetensors [--client N] [--out FILE]"
    (run,), given = parsed(words, usage, 1, ("out", "client"), ("onnx", "torchscript", "safetensors"))
    from semidfl.use.card import copy_card
    from semidfl.use.export import FORMATS
    from semidfl.use.export import export as write
    from semidfl.use.model import load_classifier

    trained, form = load_classifier(Path(run), _client(given)), given["format"]
    name = trained.config.name + ("" if len(trained.clients) > 1 else f"-client-{trained.clients[0]}")
    path = Path(given["out"]).expanduser() if "out" in given else Path(run) / "exports" / (name + FORMATS[form][0])
    apart = write(trained, form, path)
    print(f"written: {path} ({trained.whose}; answers checked against the original: off by at most {apart:.1g})")
    if card := copy_card(Path(run), path.parent):
        print(f"written: {card}")
    return 0


def generate(words: list[str]) -> int:
    usage = "semidfl generate RUN [--class NAME] [--n COUNT] [--client N] [--seed N] [--out FOLDER]"
    (run,), given = parsed(words, usage, 1, ("class", "n", "client", "seed", "out"))
    count, seed = whole_number(given, "n", 16, least=1), whole_number(given, "seed", 0)
    import torch

    from semidfl.use.generate import class_number, draw, save_images
    from semidfl.use.model import load_generator

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_generator(Path(run), _client(given), device)
    chosen = [class_number(trained, given["class"])] if "class" in given else list(range(trained.space.classes))
    folder = Path(given["out"]).expanduser() if "out" in given else Path(run) / "generated"
    sheet = save_images(trained, chosen, draw(trained, chosen, count, seed), folder)
    print(f"written: {sheet} and {count * len(chosen)} images beside it ({trained.whose})")
    return 0
