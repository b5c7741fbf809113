"""Shell completion, in the shells where they are installed, and --format json wherever a table is printed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from small import flags

from semidfl.cli import COMMANDS, main
from semidfl.commands.completion import script, words_of
from semidfl.config import Config, leaves


def bash(line: str, tmp_path: Path) -> list[str]:
    """What bash offers for the last word of a line."""
    (tmp_path / "semidfl.sh").write_text(script("bash"))
    words = line.split(" ")
    ask = f"""source semidfl.sh; COMP_WORDS=({" ".join(w or '""' for w in words)}); COMP_CWORD={len(words) - 1}
_semidfl; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("semidfl pre", ["predict"]),
        ("semidfl d", ["demo", "data", "doctor"]),
        ("semidfl data ", ["list", "get", "check", "--format", "--size", "--channels", "--classes", "--test"]),
        ("semidfl predict runs/x --", ["--input", "--client", "--format"]),
        ("semidfl export runs/x --o", ["--out"]),
        ("semidfl run d", ["demo"]),
        ("semidfl run paper --data.ra", ["--data.ratio"]),
        ("semidfl run paper --generator.kind ", ["none", "gan", "diffusion"]),
        ("semidfl run paper --compute.deterministic t", ["true"]),
        ("semidfl run paper --dataset mn", ["mnist"]),
        ("semidfl resume sem", ["semidfl.sh"]),  # a file, where nothing else fits
    ],
)
def test_bash_completes(line: str, offered: list[str], tmp_path: Path) -> None:
    assert bash(line, tmp_path) == offered


def test_bash_offers_every_command_and_field(tmp_path: Path) -> None:
    assert set(bash("semidfl ", tmp_path)) == {*COMMANDS, "version", "help"}
    assert {f"--{path}" for path, _ in leaves(Config())} <= set(bash("semidfl run paper --", tmp_path))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert all(name in text for name in COMMANDS)
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed: only the text was looked at")
    (tmp_path / "x").write_text(text)
    subprocess.run([shell, "-n", "x"], cwd=tmp_path, check=True)


def test_every_command_has_lines_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    usage = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in usage, f"{name} is not in USAGE: nobody will find it"
    assert "--input" in words_of(usage, COMMANDS)["predict"]


def test_json_wherever_a_table_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rounds in (1, 2):
        assert main(["run", "paper", *flags(method="dfl-lb", rounds=rounds, name=f"r{rounds}")]) == 0
    capsys.readouterr()
    for words, key in (
        (["data", "list"], "name"),
        (["data", "check", "digits"], "train_counts"),
        (["doctor"], "state"),
        (["compare", "runs/r1", "runs/r2"], "groups"),
    ):
        assert main([*words, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert key in (found[0] if isinstance(found, list) else found), words
