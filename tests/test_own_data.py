"""Own data from end to end, as a new user goes: check, run, predict, export; other runtimes give the same answers."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import colours, digits, few_labels, save, twelve_classes
from PIL import Image
from safetensors import safe_open
from small import TINY

from semidfl.cli import main
from semidfl.config import Config, from_toml, override
from semidfl.data.folder import scan
from semidfl.data.own import load_folder
from semidfl.data.shards import Space
from semidfl.use.export import export
from semidfl.use.generate import draw, folder_names
from semidfl.use.model import Trained, load_classifier, load_generator

FOLDERS: dict[str, tuple[Callable[[Path], Path], tuple[int, int, int], int]] = {
    "few": (few_labels, (1, 8, 8), 10),
    "twelve": (twelve_classes, (1, 8, 8), 12),
    "colours": (colours, (3, 12, 12), 3),
}
SIZE = {"colours": ["--data.size=12"]}
RUN = {name: value for name, value in TINY.items() if not name.startswith(("name", "data.dataset", "evaluation"))}


@dataclass(frozen=True)
class Done:
    name: str
    folder: Path
    run: Path
    checked: dict[str, Any]
    shape: tuple[int, int, int]
    classes: int


@pytest.fixture(scope="module", params=FOLDERS)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A folder that was checked and trained on from the command line."""
    place = tmp_path_factory.mktemp(request.param)
    make, shape, classes = FOLDERS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("SEMIDFL_DATA", str(place / "cache"))
        make(Path("own"))
        words = [f"--{name}={value}" for name, value in (RUN | {"rounds": 3, "name": "own"}).items()]
        checked = printed(["data", "check", "own", *(w.replace("data.", "") for w in SIZE.get(request.param, []))])
        assert main(["run", "paper", "--dataset=own", *words, *SIZE.get(request.param, [])]) == 0
    return Done(request.param, place / "own", place / "runs" / "own", checked, shape, classes)


def said(words: list[str]) -> str:
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        assert main(words) == 0
    return stream.getvalue()


def printed(words: list[str]) -> Any:
    return json.loads(said([*words, "--format", "json"]))


def arrays(done: Done) -> list[np.ndarray]:
    """All pictures, read by Pillow alone, in the size they have."""
    paths = sorted(p for p in done.folder.rglob("*") if p.suffix in (".png", ".bmp"))
    mode = "L" if done.shape[0] == 1 else "RGB"
    return [np.atleast_3d(np.asarray(Image.open(p).convert(mode))).transpose(2, 0, 1)[None].copy() for p in paths]


@pytest.fixture(scope="module")
def answers(done: Done) -> list[list[float]]:
    """What `semidfl predict` says of every picture, in the order of their paths."""
    found = printed(["predict", str(done.run), "--input", str(done.folder)])
    assert not any(one["error"] for one in found)
    return [list(one["probabilities"].values()) for one in sorted(found, key=lambda one: Path(one["file"]))]


def test_check_counts_what_is_there(done: Done) -> None:
    checked, listing = done.checked, scan(done.folder)
    assert tuple(checked["shape"]) == done.shape
    assert checked["classes"] == list(listing.classes)
    assert len(checked["classes"]) == done.classes
    assert sum(checked["train_counts"]) + sum(checked["test_counts"]) == sum(listing.counts().values())
    assert checked["unlabelled"] == sum(p.label is None for p in listing.pictures)
    assert sum(checked["sizes"].values()) == len(listing.pictures)
    assert not [fault for fault in checked["faults"] if fault["kind"] != "note"]
    if done.name == "few":
        assert sum(listing.counts().values()) == 20


def test_the_run_trained_on_what_was_checked(done: Done) -> None:
    config = from_toml((done.run / "config.toml").read_text())
    data = load_folder(done.folder, config.data, config.seed)
    assert data.shape == done.shape
    assert np.bincount(data.test_labels, minlength=done.classes).tolist() == done.checked["test_counts"]
    records = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    # Nobody knows the classes of images without a label: no precision is claimed.
    unknown = done.checked["unlabelled"] > 0
    assert all(p is None for r in records for p in r["pseudo_precision"]) or not unknown


def test_predictions_score_as_the_run_did(done: Done) -> None:
    config = from_toml((done.run / "config.toml").read_text())
    data = load_folder(done.folder, config.data, config.seed)
    summary = json.loads((done.run / "summary.json").read_text())
    for client in range(4):
        answer = load_classifier(done.run, client).predict(torch.from_numpy(data.test_images)).argmax(1).numpy()
        assert (answer == data.test_labels).mean() == pytest.approx(summary["last_test"][client], abs=1e-6)


def test_the_mean_model_is_the_mean(done: Done) -> None:
    rows = torch.cat([load_classifier(done.run, client).params for client in range(4)])
    mean = load_classifier(done.run)
    assert torch.allclose(mean.params[0], rows.mean(0), atol=1e-7)
    assert mean.space.names == scan(done.folder).classes
    images = torch.randint(0, 256, (5, *done.shape), dtype=torch.uint8)
    assert mean.predict(images).sum(1) == pytest.approx(torch.ones(5))


def test_onnx_gives_the_same_answers(done: Done, answers: list[list[float]], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    text = said(["export", str(done.run), "--format", "onnx", "--out", str(file)])
    assert "checked against the original" in text
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    ours = [session.run(None, {"image": pixels})[0][0] for pixels in arrays(done)]
    assert np.abs(np.array(ours) - np.array(answers)).max() < 1e-4
    meta = session.get_modelmeta().custom_metadata_map
    assert json.loads(meta["classes"]) == list(scan(done.folder).classes)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model_card.md"]  # nothing beside it is needed


def test_torchscript_gives_the_same_answers(done: Done, answers: list[list[float]]) -> None:
    said(["export", str(done.run), "--format=torchscript"])
    extra = {"metadata.json": ""}
    model = torch.jit.load(str(done.run / "exports" / "own.pt"), _extra_files=extra)
    ours = [model(torch.from_numpy(pixels))[0].numpy() for pixels in arrays(done)]
    assert np.abs(np.array(ours) - np.array(answers)).max() < 1e-4
    assert json.loads(json.loads(extra["metadata.json"])["classes"]) == list(scan(done.folder).classes)


def test_safetensors_hold_the_weights_and_say_what_to_do(done: Done) -> None:
    said(["export", str(done.run), "--format=safetensors", "--client=2"])
    with safe_open(done.run / "exports" / "own-client-2.safetensors", framework="pt") as file:
        meta = file.metadata()
        own = load_classifier(done.run, 2)
        weights = own.classifier.row({name: file.get_tensor(name) for name in own.classifier.shapes})
    assert torch.equal(weights, own.params[0])
    assert meta["weights"] == "client 2"
    assert f"{done.shape[1]}x{done.shape[2]}" in meta["preprocessing"]


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_a_resnet_is_exported_too(form: str, tmp_path: Path) -> None:
    config = override(Config(), {"classifier.model": "resnet18"})
    space = Space(3, 9, 11, 4, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    empty = Trained(tmp_path, config, space, torch.empty(1, 0), (0,))
    trained = replace(empty, params=empty.classifier.initial(0)[None])
    assert export(trained, form, tmp_path / "x") <= 1e-5


def test_predictions_as_table_and_csv(done: Done) -> None:
    picture = next(p for p in sorted(done.folder.rglob("*")) if p.suffix in (".png", ".bmp"))
    words = ["predict", str(done.run), "--input", str(picture), "--client", "1"]
    found = printed(words)[0]
    assert found["probability"] == max(found["probabilities"].values())
    assert found["probabilities"][found["label"]] == found["probability"]
    (row,) = csv.DictReader(io.StringIO(said([*words, "--format=csv"])))
    assert row == {"file": str(picture), "class": found["label"], "probability": f"{found['probability']:.4f}"}
    assert said(words).splitlines()[1].split() == list(row.values())


def test_generated_images(done: Done) -> None:
    names = scan(done.folder).classes
    said(["generate", str(done.run), "--class", names[-1], "--n", "5", "--seed=3"])
    trained = load_generator(done.run)
    images = draw(trained, [len(names) - 1], 5, seed=3)
    for k in range(5):
        pixels = np.asarray(Image.open(done.run / "generated" / names[-1] / f"{k:04d}.png"))
        assert np.array_equal(np.atleast_3d(pixels).transpose(2, 0, 1), images[0, k])
    assert not np.array_equal(images, draw(trained, [len(names) - 1], 5, seed=4))
    said(["generate", str(done.run), "--n=2", "--out", str(done.run / "all")])
    assert len(scan(done.run / "all").counts()) == done.classes  # a folder that a run could train on
    assert (done.run / "all" / "sheet.png").exists()


def test_every_class_has_a_folder_of_its_own_within_the_one_given() -> None:
    assert folder_names(["cat", "über", "a b", "-x"]) == ["cat", "über", "a_b", "-x"]
    names = ["cat", "..", ".", "a b", "a_b", "A?b", "3-a_b", ".hidden", "", "../../etc"]
    found = folder_names(names)
    assert len({name.casefold() for name in found}) == len(names)
    for name in (*found, *folder_names(["..", "../../etc"])):
        assert re.fullmatch(r"[\w-][\w.-]*", name), name


def test_the_model_card_tells_the_numbers(done: Done) -> None:
    card, summary = (done.run / "model_card.md").read_text(), json.loads((done.run / "summary.json").read_text())
    assert f"**{100 * summary['accuracy']:.2f} %**" in card
    shown = [line.split("|")[3:5] for line in card.splitlines() if line.startswith("| all")]
    labelled, unlabelled = (int(cell) for cell in shown[0])
    if done.checked["unlabelled"]:
        assert (labelled, unlabelled) == (sum(done.checked["train_counts"]), done.checked["unlabelled"])
    assert f"{sum(done.checked['test_counts'])} images that no client trained on" in card
    for part in ("Intended use", "Limits", "Recipe", "labelled and unlabelled (M)"):
        assert part in card
    data = load_folder(done.folder, from_toml((done.run / "config.toml").read_text()).data, 0)
    right = load_classifier(done.run).predict(torch.from_numpy(data.test_images)).argmax(1).numpy() == data.test_labels
    assert f"has {100 * right.mean():.2f} % after the last round" in card


def test_an_export_that_answers_otherwise_is_not_kept(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from semidfl.use import deploy

    wrong = lambda old, new: deploy_weights(old, new).flip(0)  # noqa: E731
    deploy_weights = deploy._weights
    monkeypatch.setattr(deploy, "_weights", wrong)
    assert main(["export", str(done.run), "--format=torchscript", "--out", str(tmp_path / "x.pt")]) == 2
    assert "is not kept: its answers are off by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["semidfl", "dfl-lb", "mixmatch", "flexmatch", "cbafed"])
@pytest.mark.parametrize("variant", ["paper", "tuned"])
def test_every_method_takes_images_without_labels(
    method: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the very first image has none, to which the empty cells of tables point."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    few_labels(Path("own"))
    for k in range(10):  # so that unlabeled/ comes first
        Path(f"own/{k}").rename(f"own/v{k}")
    words = [f"--{name}={value}" for name, value in (RUN | {"rounds": 2, "pseudo.align": True}).items()]
    assert main(["run", "paper", "--dataset=own", *words, f"--method={method}", f"--variant={variant}"]) == 0


def test_sites_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    for k, (pixels, label) in enumerate(digits(120)):
        place = ("a/unlabeled", f"b/{label}", f"c/{label}" if k % 2 else "c/unlabeled")[k % 3]
        save(Path("shared") / place / f"{k}.png", pixels)
    assert [s["role"] for s in printed(["data", "check", "shared"])["sites"]] == ["U", "L", "M"]
    settings = RUN | {"rounds": 2, "graph.clients": 3, "graph.roles": "", "name": "sites"}
    words = ["run", "paper", "--dataset=shared", *(f"--{name}={value}" for name, value in settings.items())]
    assert main(words) == 0
    assert from_toml(Path("runs/sites/config.toml").read_text()).graph.roles == "ULM"
    summary = Path("runs/sites/summary.json").read_text()
    capsys.readouterr()
    assert main(["resume", "runs/sites"]) == 0  # finds the same data, roles and clients again
    assert json.loads(Path("runs/sites/summary.json").read_text())["per_client"] == json.loads(summary)["per_client"]
    assert "| unlabelled only (U) | 1 | 0 | 40 |" in Path("runs/sites/model_card.md").read_text()


def test_the_upper_bound_needs_every_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few_labels(Path("own"))
    words = [f"--{name}={value}" for name, value in RUN.items()]
    assert main(["run", "paper", "--dataset=own", *words, "--method=dfl-ub"]) == 2
    assert "method = 'dfl-ub' needs every label, and 130 images of own have none" in capsys.readouterr().err
