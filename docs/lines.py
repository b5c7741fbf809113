"""Keeps the line numbers in docs/*.md right: [name](../path/file.py#L12) points at the line that defines `name`.

python docs/lines.py           # rewrite
python docs/lines.py --check   # exit code 1 if any is wrong
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
LINK = re.compile(r"\[`?(?P<name>[\w.]+)`?\]\((?P<path>\.\./[\w/.]+\.py)#L(?P<line>\d+)\)")


def line_of(name: str, path: Path) -> int:
    """The line where a class, function, method, field or constant of this name is defined."""
    leaf = re.escape(name.rsplit(".", 1)[-1])
    define = re.compile(rf"^\s*(?:def|class) {leaf}\b|^\s*{leaf}\s*(?::[^=]+)?=|^\s+{leaf}:|^\s*\"{leaf}\":")
    lines = path.read_text().splitlines()
    start = 0
    if "." in name:  # Class.member: search below the class
        start = line_of(name.rsplit(".", 1)[0], path)
    for number, text in enumerate(lines[start:], start=start + 1):
        if define.match(text):
            return number
    raise SystemExit(f"{path}: nothing called {name}")


def renewed(text: str) -> str:
    def fix(match: re.Match[str]) -> str:
        line = line_of(match["name"], (HERE / match["path"]).resolve())
        return match[0].replace(f"#L{match['line']})", f"#L{line})")

    return LINK.sub(fix, text)


def main(check: bool) -> int:
    stale = []
    for page in sorted(HERE.glob("*.md")):
        text = page.read_text()
        new = renewed(text)
        if new != text:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    if check and stale:
        print(f"line numbers are old in {', '.join(stale)}: run python docs/lines.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
