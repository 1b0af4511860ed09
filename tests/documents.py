"""What is taken out of the pages for people, to be tried."""

import re
import shlex
from pathlib import Path

from tests.conftest import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
DOORS = ("convert", "evaluate", "generate", "plan", "prepare", "train")
COMMAND = re.compile(rf"(?:scripts/|dseek-|python -m dseekjax\.)({'|'.join(DOORS)})(?![\w.]) *")
"""The beginning of a command that is a door; what follows are its words."""


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code of a language, "" for those of none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for tag, code in fenced if tag == language]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Every command of a page that is a door, and its words: in ```bash, after `$ `, and between backticks."""
    text = page.read_text()
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in lines:
        if match := COMMAND.match(line):
            words = [word for word in shlex.split(line[match.end() :], comments=True) if word != "&"]
            if words:
                found.append((match[1], words))
    return found
