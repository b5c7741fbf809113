"""`semidfl completion bash|zsh|fish`: a script with which the shell completes commands, options and values.

All of it is read from what `semidfl help` prints and from the config: a new command completes as soon as it is there.
"""

import re
from collections.abc import Mapping
from typing import Literal, get_args, get_origin

from semidfl.config import Config, kinds, leaves
from semidfl.errors import ConfigError, nearest
from semidfl.recipes import RECIPES

__all__ = ["completion", "script", "words_of"]

_DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10")
_FIXED = {"data": ("list", "get", "check"), "completion": ("bash", "zsh", "fish"), "run": tuple(RECIPES)}


def completion(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in _SCRIPTS:
        shell = words[0] if words else ""
        raise ConfigError(f"usage: semidfl completion bash|zsh|fish{nearest(shell, _SCRIPTS)}")
    print(script(words[0]))
    return 0


def words_of(usage: str, commands: Mapping[str, object]) -> dict[str, list[str]]:
    """What may follow each command: subcommands, and the options that its lines of the usage name."""
    found: dict[str, list[str]] = {name: list(_FIXED.get(name, ())) for name in (*commands, "version", "help")}
    current = ""
    for line in usage.splitlines():
        if head := re.match(r"  ([a-z][\w-]*)", line):
            current = head[1]
        if current in found:
            found[current] += [flag for flag in re.findall(r"--[a-z][\w-]*", line) if flag not in found[current]]
    fields = [f"--{path}" for path, _ in leaves(Config())]
    for name in ("run", "demo"):
        found[name] += fields
    return found


def values_of() -> dict[str, list[str]]:
    """The values of options that have few."""
    found = {f"--{p}": list(map(str, get_args(k))) for p, k in kinds().items() if get_origin(k) is Literal}
    found |= {f"--{path}": ["true", "false"] for path, kind in kinds().items() if kind is bool}
    return found | {"--dataset": list(_DATASETS), "--data.dataset": list(_DATASETS)}


def script(shell: str) -> str:
    """The script for a shell."""
    from semidfl.cli import COMMANDS, USAGE

    return _SCRIPTS[shell](words_of(USAGE.format(recipes=", ".join(RECIPES)), COMMANDS), values_of())


def _bash(words: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {name}) options="{" ".join(some)}" ;;' for name, some in words.items() if some)
    choices = "\n".join(f'    {name}) options="{" ".join(some)}" ;;' for name, some in values.items())
    return f"""# semidfl completion bash > ~/.local/share/bash-completion/completions/semidfl
_semidfl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" options=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))
    return
  fi
  case "$before" in
{choices}
  esac
  if [ -z "$options" ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$options" -- "$word"))
  if [ ${{#COMPREPLY[@]}} -eq 0 ]; then
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _semidfl semidfl"""


def _zsh(words: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    # zsh runs bash's functions as they are.
    return "#compdef semidfl\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(words, values).replace(
        "# semidfl completion bash > ~/.local/share/bash-completion/completions/semidfl",
        '# in ~/.zshrc: eval "$(semidfl completion zsh)"',
    )


def _fish(words: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    lines = ["# semidfl completion fish > ~/.config/fish/completions/semidfl.fish"]
    lines += [f"complete -c semidfl -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for name, some in words.items():
        where = f"-n '__fish_seen_subcommand_from {name}'"
        if plain := [word for word in some if not word.startswith("--")]:
            lines.append(f"complete -c semidfl {where} -a '{' '.join(plain)}'")
        for flag in (word for word in some if word.startswith("--")):
            choice = f" -x -a '{' '.join(values[flag])}'" if flag in values else ""
            lines.append(f"complete -c semidfl {where} -l '{flag[2:]}'{choice}")
    return "\n".join(lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
