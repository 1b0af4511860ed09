"""The reference and the picture are what the code is now."""

import re

import pytest

from dseekjax.config import Config
from dseekjax.config_reference import describe
from scripts.documents import architecture, reference
from tests.conftest import REPOSITORY
from tests.test_architecture import ROOMS

FOLDER = REPOSITORY / "docs" / "reference"


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


def test_the_reference_is_written_anew_when_the_code_changes(pages, request):
    for name, text in pages.items():
        if request.config.getoption("--update-golden"):
            (FOLDER / name).write_text(text)
        assert (FOLDER / name).read_text() == text, "a docstring or a config model changed; run scripts/write_reference"
    assert {path.name for path in FOLDER.iterdir()} == set(pages)


def test_the_reference_has_every_key_and_every_public_name(pages):
    import dseekjax
    import dseekjax.plan

    assert set(re.findall(r"^\| `([\w.]+)`", pages["config.md"], re.MULTILINE)) == {k.name for k in describe(Config)}
    titles = set(re.findall(r"^### (\w+)$", pages["library.md"], re.MULTILINE))
    assert titles == {*dseekjax.__all__, *dseekjax.plan.__all__}
    for name in ("attention", "matmul", "fp8_dense", "rms_norm", "quantize_int8"):
        assert f"### {name}\n" in pages["kernels.md"]


def test_arguments_become_lists(pages):
    assert "- `path`: the run's folder.\n" in pages["library.md"]
    assert "open_trained(\n    path: str | Path,\n    overrides: Sequence[str] = (),\n    *,\n" in pages["library.md"]


def test_the_picture_has_every_room_and_every_import():
    picture = (REPOSITORY / "docs" / "architecture.svg").read_text()
    told = "the code changed; run scripts/draw_architecture"
    assert set(re.findall(r'id="(\w+ imports \w+)"', picture)) == {
        f"{room} imports {lower}" for room, lower in architecture.arrows()
    }, told
    words = re.findall(r">([^<>\n]+)</t(?:ext|span)>", picture)
    assert set(architecture.rooms()) <= set(words), told
    for door in architecture.doors():
        assert f"dseekjax.{door} {', '.join(sorted(architecture.rooms_behind(door)))}" in " ".join(words), told
    for room in architecture.rooms():
        assert f"{room} {architecture.sentence(room)}" in " ".join(words), told
    assert {*ROOMS, architecture.KERNELS} == set(architecture.rooms())


def test_the_picture_can_be_drawn(tmp_path):
    architecture.draw(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 10_000
