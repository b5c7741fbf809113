"""What new users do wrong: one clear line each, with what to do, exit code 2, and never a stack trace.

Each mistake is made in a process of its own, as a user would, where that shows more; else in this one.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from folders import digits, few_labels, save
from safetensors import safe_open
from small import flags

from semidfl.cli import main
from semidfl.record.checkpoint import load_model, save_model

RUN = ["run", "paper", *flags(rounds=1, method="dfl-lb")]
NOBODY = 65534


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(RUN) == 0
    return place / "runs" / "tiny"


def one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that a refused command prints."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("semidfl: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def own(words: str = "own") -> list[str]:
    return [*RUN, f"--data.dataset={words}"]


def fault(kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of `data check` of this kind, which ends with exit code 2."""
    assert main(["data", "check", "own"]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith(f"{kind}: ")]
    assert len(lines) == 1, printed.out
    assert "Traceback" not in printed.out + printed.err
    return lines[0]


def test_1_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (own("./scans"), ["data", "check", "scans/"], [*RUN, "--dataset", "scans/"]):
        line = one_line(words, capsys)
        assert "there is no folder scans: check the spelling, or create it; expected a folder for each class" in line


def test_2_an_empty_class(capsys: pytest.CaptureFixture[str]) -> None:
    (few_labels(Path("own")) / "cat").mkdir()
    expected = "class 'cat' has no images: put some into its folder, or remove the folder"
    assert expected in one_line(own(), capsys)
    assert expected in fault("stop", capsys)


def test_3_a_label_typo(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["file,label"]
    for k, (pixels, label) in enumerate(digits(60)):
        save(Path("own") / f"{k}.png", pixels)
        rows.append(f"{k}.png,{'odd' if label % 2 else 'even'}" if k else f"{k}.png,evne")
    Path("own/labels.csv").write_text("\n".join(rows))
    assert main(["data", "check", "own", "--classes=even,odd"]) == 2
    assert (
        "label 'evne' (1 image, such as 0.png) is not among data.classes (did you mean 'even'?)"
        in capsys.readouterr().out
    )
    rows[1] = "0.png,Even"
    Path("own/labels.csv").write_text("\n".join(rows))
    expected = "label 'Even' (1 image, such as 0.png) looks like a misspelt 'even'"
    for line in (one_line(own(), capsys), fault("stop", capsys)):
        assert expected in line
        assert "correct it, or name all classes with --data.classes" in line


def test_4_one_class_only(capsys: pytest.CaptureFixture[str]) -> None:
    for k, (pixels, _) in enumerate(digits(20)):
        save(Path("own") / ("cat" if k < 10 else "unlabeled") / f"{k}.png", pixels)
    expected = "all labels are of one class, 'cat': a classifier needs two or more; label others too"
    assert expected in one_line(own(), capsys)
    assert expected in fault("stop", capsys)


def test_5_a_corrupted_png(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few_labels(Path("own"))
    broken = next(Path("own/3").iterdir())
    broken.write_bytes(broken.read_bytes()[:40])
    assert f"3/{broken.name} cannot be read and is skipped" in fault("mend", capsys)
    assert "replace or remove it" in fault("mend", capsys)
    expected = f"{broken} cannot be read ("
    assert expected in one_line(["predict", str(finished), "--input", str(broken)], capsys)
    # A run goes on without it, and says so.
    with pytest.warns(UserWarning, match=f"1 images that cannot be read are skipped .3/{broken.name}"):
        assert main([*own(), "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["predict", str(finished), "--input", "own"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"{broken} cannot be read and is skipped" in printed.err
    assert len(printed.out.splitlines()) == 1 + 149


def test_6_a_wrong_number_of_channels(capsys: pytest.CaptureFixture[str]) -> None:
    few_labels(Path("own"))
    for words in ([*own(), "--data.channels=4"], ["data", "check", "own", "--channels=4"]):
        assert "data.channels = 4 is not legal: it must be 0 (found out), 1 (grey) or 3" in one_line(words, capsys)
    four = np.zeros((4, 8, 8, 4), np.uint8)
    np.savez("own.npz", x_train=four, y_train=np.array([0, 1, 0, 1]), x_test=four, y_test=np.array([0, 1, 0, 1]))
    line = one_line(own("own.npz"), capsys)
    assert (
        "x_train has the shape (4, 8, 8, 4); expected uint8 of shape (n, H, W) or (n, H, W, ch) with ch 1 or 3" in line
    )


def test_7_a_run_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    few_labels(Path("own"))
    for words in (
        ["predict", "runs/nope", "--input", "own"],
        ["export", "runs/nope", "--format", "onnx"],
        ["generate", "runs/nope", "--class", "3"],
    ):
        assert "there is no run folder runs/nope: `ls runs` shows those here" in one_line(words, capsys)
    assert "there is no run folder runs/nope" in one_line(["resume", "runs/nope"], capsys)
    assert "own is not a run folder: config.toml is missing" in one_line(["predict", "own", "--input", "own"], capsys)


def test_7b_a_run_that_has_not_ended(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished, "half")
    shutil.rmtree("half/models")
    line = one_line(["predict", "half", "--input", "x.png"], capsys)
    assert "half has no trained models yet: end the run first (`semidfl resume half`; a peer" in line
    assert "has no generator" in one_line(["generate", str(finished)], capsys)  # labels only


def test_8_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 2
        printed = capsys.readouterr()
        assert printed.err == ""
        assert [line for line in printed.out.splitlines() if "another program listens there" in line and "bad" in line]
        assert f"- port {port}: choose another, or end what listens there" in printed.out


def rewrite(path: Path, **changes: str | None) -> None:
    """The same file with other metadata, rightly summed."""
    tensors, meta = load_model(path)
    meta |= {name: value for name, value in changes.items() if value is not None}
    save_model(path, tensors, {k: v for k, v in meta.items() if k not in changes or changes[k] is not None})


@pytest.mark.parametrize(
    ("changes", "wrote"), [({"format": "1"}, "0.1.0"), ({"format": None, "version": None}, "of an earlier")]
)
def test_9_a_checkpoint_of_another_version(
    finished: Path, changes: dict[str, str | None], wrote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, "old")
    for path in [*Path("old/checkpoints").glob("*.safetensors"), *Path("old/models").glob("*.safetensors")]:
        rewrite(path, **changes)
    line = one_line(["resume", "old"], capsys)
    assert f"old/checkpoints was written by semidfl {wrote}" in line
    assert "start anew: semidfl run old/config.toml --overwrite" in line
    line = one_line(["predict", "old", "--input", "x.png"], capsys)
    assert "old/models/classifier-0000.safetensors was written by semidfl" in line


def test_9b_a_model_of_another_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished, "other")
    text = Path("other/config.toml").read_text()
    Path("other/config.toml").write_text(text.replace('model = "cnn"', 'model = "resnet18"'))
    assert "holds another network than config.toml describes" in one_line(["predict", "other", "--input", "."], capsys)


def test_9c_a_damaged_model(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished, "bad")
    path = Path("bad/models/classifier-0002.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    few_labels(Path("own"))
    assert "classifier-0002.safetensors is damaged" in one_line(["predict", "bad", "--input", "own"], capsys)


@contextmanager
def nobody() -> Iterator[None]:
    """Root may write everywhere: for a moment, be somebody who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of another kind")
def test_10_no_permission_to_write(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "shown"
    shutil.copytree(finished, run)
    for file in run.rglob("*"):
        file.chmod(0o755)
    for parent in (*tmp_path.parents, *finished.parents):  # pytest's folders are for their owner only
        if parent.is_relative_to(tempfile.gettempdir()) and parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o755)
    few_labels(tmp_path / "own")
    tmp_path.chmod(0o555)
    main(["export", str(run), "--format=torchscript", "--out", str(run / "ready.pt")])  # all modules are loaded
    capsys.readouterr()
    try:
        with nobody():
            if os.access(tmp_path, os.W_OK, effective_ids=True):
                pytest.skip("everybody may write here")
            for words, place in (
                (RUN, "runs"),
                (["export", str(run), "--format=torchscript", "--out", str(tmp_path / "x" / "m.pt")], str(tmp_path)),
                (["export", str(run), "--format=torchscript"], str(run)),
            ):
                line = one_line(words, capsys)
                assert f"cannot write {place}" in line
                assert "no permission to write there" in line
                assert "choose another" in line
            assert main(["doctor"]) == 2
            assert "no permission to write in" in capsys.readouterr().out
    finally:
        tmp_path.chmod(0o755)


def test_all_of_it_in_a_process_of_its_own(tmp_path: Path) -> None:
    few_labels(tmp_path / "own")
    (tmp_path / "own" / "3" / "bad.png").write_bytes(b"junk")
    (tmp_path / "own" / "empty").mkdir()
    command = [sys.executable, "-m", "semidfl", "data", "check", "own", "--format=json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert [f["kind"] for f in json.loads(done.stdout)["faults"]] == ["stop", "mend"]


def test_options_that_do_not_exist(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished)
    for words, parts in (
        (["predict", run], ["--input is missing"]),
        (["predict", run, "--inptu", "x"], ["no option --inptu", "did you mean 'input'"]),
        (["predict", run, "--input", "nope.png"], ["no image or folder nope.png"]),
        (["predict", run, "--input", ".", "--client", "9"], ["has no client 9: they are 0 to 3"]),
        (["predict", run, "--input", ".", "--client", "x"], ["--client x is not legal"]),
        (["predict", run, "--input", "."], ["holds no images"]),
        (["export", run, "--format", "onx"], ["--format onx is not legal", "did you mean 'onnx'"]),
        (["export"], ["usage: semidfl export RUN"]),
        (["generate", run, "--n", "0"], ["--n 0 is not legal"]),
        (["generate", run, "--seed", "9" * 30], ["is not legal: it must be a whole number"]),
        (["data", "check"], ["usage: semidfl data"]),
        (["data", "check", "digits", "--size=3"], ["data.size = 3 is not legal"]),
        (["data", "list", "--format=xml"], ["--format xml is not legal"]),
        (["completion", "bsh"], ["usage: semidfl completion", "did you mean 'bash'"]),
        (["doctor", "--port", "http"], ["--port http is not legal"]),
    ):
        line = one_line(words, capsys)
        assert all(part in line for part in parts), line


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "mkdir", full)
    line = one_line(["federation", "new", "f", "--peers", "a=L,b=U", "--dataset", "digits"], capsys)
    assert line == "semidfl: cannot write f: the disk is full: free some space\n"


def test_other_faults_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the package that is missing, or a child process that is lost, is a defect and shows where."""

    def lost(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    monkeypatch.setattr(Path, "mkdir", lost)
    with pytest.raises(ProcessLookupError):
        main(["federation", "new", "f", "--peers", "a=L,b=U", "--dataset", "digits"])


def test_metadata_say_who_wrote_a_file(finished: Path) -> None:
    for folder in ("models", "checkpoints"):
        path = next((finished / folder).glob("*.safetensors"))
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "2"
            assert file.metadata()["version"]
