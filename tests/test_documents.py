"""What is written for people is true."""

import doctest
import re
import subprocess
import sys
import zipfile

import pytest

import dseekjax
import dseekjax.plan
from dseekjax.config import load_config, recipe_path
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_examples_run():
    for name in ("README.md", "docs/data.md", "docs/evaluation.md", "docs/finetuning.md", "docs/speed.md"):
        path = str(REPOSITORY / name)
        assert doctest.testfile(path, module_relative=False, optionflags=doctest.ELLIPSIS).failed == 0
    for module in (dseekjax, dseekjax.plan):
        assert doctest.testmod(module).failed == 0


def test_readme_names_only_what_exists():
    for path in re.findall(r"\]\(([^)]+)\)|`((?:scripts|docs|tests|configs|pallas_kernels)/[\w./]*)", README):
        assert (REPOSITORY / (path[0] or path[1])).exists(), path
    for recipe in re.findall(r"--model (\w+)", README):
        recipe_path(recipe)
    overrides = re.findall(r"(?<![\w.])((?:train|model|mesh|run|data)\.[\w.]+=[\w./-]+)", README)
    assert len(overrides) >= 6
    load_config(recipe_path("quickstart"), overrides)


def test_wheel_holds_configs_and_the_novel(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "dseekjax/configs/quickstart.yaml",
        "dseekjax/configs/llama3_8b.yaml",
        "dseekjax/configs/clusters/h100_sxm.yaml",
        "pallas_kernels/gpus/h100_sxm/target.txtpb",
        "dseekjax/data/texts/emma.txt",
        "dseekjax/evaluation/examples/emma_endings.jsonl",
        "dseekjax/data/templates/chatml.jinja",
        "pallas_kernels/attention/api.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests", "scripts", "configs/"))]


def pins(lock):
    return [line for line in (REPOSITORY / lock).read_text().splitlines() if re.match(r"[a-zA-Z0-9]", line)]


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-cuda12.lock"])
def test_lock_names_no_host_and_hashes_everything(lock):
    assert "://" not in (REPOSITORY / lock).read_text()
    assert all(re.match(r"[\w.\[\],-]+==[\w.]+", pin) for pin in pins(lock))
    assert all(pin.endswith("\\") for pin in pins(lock))


def test_the_lock_of_transformers_names_no_host_and_one_version_of_everything():
    assert "://" not in (REPOSITORY / "requirements-transformers.lock").read_text()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins("requirements-transformers.lock"))


def test_the_cuda_lock_adds_to_the_plain_one_and_changes_nothing():
    added = set(pins("requirements-cuda12.lock")) - set(pins("requirements.lock"))
    assert set(pins("requirements.lock")) < set(pins("requirements-cuda12.lock"))
    assert all(re.match(r"(jax-cuda12|nvidia)-", pin) for pin in added)
