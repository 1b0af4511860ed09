"""The messages that the page on troubleshooting quotes are those of the code."""

import ast
import re

import pytest

from dseekjax.config import Config
from dseekjax.config_reference import describe
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
OBSERVED = ("ln(vocabulary_size)", "target_tokens", "data_wait_seconds", "step_seconds", "metrics.jsonl", "mfu")
"""Names in what is seen, which are no messages; and what XLA says."""
FROM_XLA = ("RESOURCE_EXHAUSTED",)


def quoted():
    """What stands between backticks in the first column of a row."""
    for row in re.findall(r"^\| (?!what you see)(.*)$", PAGE, re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", row.partition(" | ")[0])


def texts():
    """Every string in the code, with … for what is put into it."""
    for path in (REPOSITORY / "dseekjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield (REPOSITORY / "scripts" / "environment").read_text()


MESSAGES = sorted({message for message in quoted() if message not in OBSERVED + FROM_XLA})


@pytest.fixture(scope="module")
def code():
    return "\n".join(texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message, code):
    parts = [part.strip(" …") for part in message.removeprefix("error: ").split("…")]
    for part in parts:
        assert part in code, part
    assert max(map(len, parts)) >= 12


def test_there_are_many_messages():
    assert len(MESSAGES) >= 25


def test_keys_that_are_advised_exist():
    keys = {key.name for key in describe(Config)}
    sections = "|".join(Config.model_fields)
    for name in re.findall(rf"`((?:{sections})\.\w[\w.]*)", PAGE):
        assert name in keys or name == "metrics.jsonl", name
