"""Wraps the prose of README.md and docs/*.md at 120 columns; tables, code and headings stay as they are.

python docs/wrap.py           # rewrite
python docs/wrap.py --check   # exit code 1 if a file would change
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
WRITTEN_BY_PROGRAMS = ("config.md", "results.md")
COLUMNS = 120
_BULLET = re.compile(r"\s*([-*]|\d+\.)\s+")


def wrapped(text: str) -> str:
    return "\n".join(line for prose, block in _blocks(text.split("\n")) for line in (_fold(block) if prose else block))


def _blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Whether it is prose, and the lines of a paragraph or item of a list; whatever is not prose line by line."""
    block: list[str] = []
    code = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        plain = code or fence or not line.strip() or line.lstrip().startswith(("|", "#", "![", "<"))
        code ^= fence
        if block and (plain or _BULLET.match(line)):
            yield True, block
            block = []
        if plain:
            yield False, [line]
        else:
            block.append(line)
    if block:
        yield True, block


def _fold(block: list[str]) -> list[str]:
    if max(map(len, block)) <= COLUMNS:  # as somebody has set it
        return block
    bullet = _BULLET.match(block[0])
    indent = " " * (len(bullet[0]) if bullet else len(block[0]) - len(block[0].lstrip()))
    first = bullet[0] if bullet else indent
    text = " ".join([block[0][len(first) :], *(line.strip() for line in block[1:])])
    return textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    pages = [HERE.parent / "README.md", *(p for p in sorted(HERE.glob("*.md")) if p.name not in WRITTEN_BY_PROGRAMS)]
    old = [page for page in pages if page.read_text(encoding="utf-8") != wrapped(page.read_text(encoding="utf-8"))]
    if sys.argv[1:] == ["--check"]:
        sys.exit(bool(old))
    for page in old:
        page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")
