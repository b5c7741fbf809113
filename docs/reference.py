"""Writes docs/config.md, the reference of all settings, from the dataclasses themselves.

python docs/reference.py           # rewrite
python docs/reference.py --check   # exit code 1 if it is old
"""

import sys
from pathlib import Path

from semidfl.config import Config, help_of, kinds, leaves
from semidfl.legal import legal_words

PAGE = Path(__file__).parent / "config.md"
HEAD = """# All settings

Made by `python docs/reference.py` from [config.py](../semidfl/config.py); the tests keep it current.

A setting is given on the command line as `--section.field value`, or `--field value` where only one section has a field
of that name, and in a config file (`semidfl run mine.toml`) as TOML; a run keeps all of them in `config.toml`. The
defaults are the paper's recipe for MNIST; `semidfl run RECIPE --dry-run` prints those of any other.
"""
SECTIONS = {
    "": "The run",
    "data": "Data",
    "graph": "Graph and roles",
    "augment": "Augmentation",
    "classifier": "Classifier",
    "pseudo": "Pseudo-labels",
    "generator": "Generator",
    "mixup": "MixUp",
    "aggregation": "Aggregation",
    "evaluation": "Testing",
    "compute": "Machine",
}


def page() -> str:
    lines, last = [HEAD], None
    helps = help_of()
    for path, value in leaves(Config()):
        section, _, name = path.rpartition(".")
        if section != last:
            title = SECTIONS.get(section, section.capitalize())
            name_of_table = f" `[{section}]`" if section else ""
            lines += [f"\n## {title}{name_of_table}\n", "| field | default | legal | meaning |", "|---|---|---|---|"]
            last = section
        shown = str(value).lower() if isinstance(value, bool) else f"{value}" if value != "" else "(empty)"
        lines.append(f"| `{name}` | {shown} | {legal_words(path, kinds()[path])} | {helps[path]} |")
    return "\n".join(lines) + "\n"


def main(check: bool) -> int:
    text = page()
    if check:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/config.md is old: run python docs/reference.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
