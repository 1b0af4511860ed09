import json

import pytest

from tests.data.corpora import TEXTS


@pytest.fixture
def lines(tmp_path):
    """A file of `TEXTS` as JSON lines."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path
