"""What is written for people is true."""

import doctest
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dseekjax
import dseekjax.plan
from dseekjax.config import load_config, recipe_path
from dseekjax.train import main as train
from tests.conftest import REPOSITORY
from tests.documents import DOORS, PAGES, blocks, commands, name_of

README = (REPOSITORY / "README.md").read_text()
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_COMMANDS = [page for page in PAGES if commands(page)]


@pytest.fixture(scope="session")
def beside_a_run(tmp_path_factory):
    """A folder with the `runs/quickstart` that pages speak of, trained for a moment."""
    folder = tmp_path_factory.mktemp("documents")
    small = ("model.num_layers=1", "train.steps=4", "train.global_batch_size=8", "optimizer.schedule.warmup_steps=2")
    kept = (f"data.cache_dir={folder / 'cache'}", "run.compilation_cache_dir=null", "insight.tensorboard=false")
    where = f"run.dir={folder / 'runs' / 'quickstart'}"
    assert train(["--model", "quickstart", *small, *kept, where]) == 0
    return folder


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_examples_run(page, beside_a_run, monkeypatch):
    monkeypatch.chdir(beside_a_run)
    assert doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS).failed == 0
    for code in blocks(page, "python"):
        if ">>>" not in code:
            exec(compile(code, name_of(page), "exec"), {})


def test_examples_of_docstrings_run():
    for module in (dseekjax, dseekjax.plan):
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_doors_take_the_options_and_keys_of_every_command(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for door, words in commands(page):
        if door == "prepare" and words[0] in ("inspect", "verify"):
            assert len(words) == 2
            continue
        module = importlib.import_module({"plan": "dseekjax.plan.__main__"}.get(door, f"dseekjax.{door}"))
        if "--help" in words:
            assert "--help" in words[-1]
            continue
        if door == "train" and not {"--config", "--model"} & set(words):
            words = ["--model", "quickstart", *words]
        options = module._parse(words)
        if door in ("train", "plan"):
            if options.config and not Path(options.config).exists():  # what an earlier command makes
                options.config = recipe_path("quickstart")
            module._load(options)
        else:
            load_config(recipe_path("quickstart"), getattr(options, "overrides", []))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, section = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if section:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert section in [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles], target


def test_every_page_is_in_the_index():
    index = REPOSITORY / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - {index} <= linked
    assert "(docs/README.md)" in README


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_of_the_repository_exist(page):
    tops = sorted(path.name for path in REPOSITORY.iterdir() if path.is_dir() and path.name != "runs")
    for path in re.findall(rf"`((?:{'|'.join(map(re.escape, tops))})/[\w./]*)", page.read_text()):
        assert (REPOSITORY / path).exists(), path
    # House rooms go by their own names there.
    for path in re.findall(r"`(\w+/[\w/]*(?:\.py|/))`", page.read_text()) if page.name == "house.md" else []:
        assert (REPOSITORY / path).exists() or (REPOSITORY / "dseekjax" / path).exists(), path


def test_readme_names_only_what_exists():
    for recipe in re.findall(r"--model (\w+)", README):
        recipe_path(recipe)
    overrides = re.findall(r"(?<![\w.])((?:train|model|mesh|run|data)\.[\w.]+=[\w./-]+)", README)
    assert len(overrides) >= 6
    load_config(recipe_path("quickstart"), overrides)
    assert {door for page in PAGES for door, _ in commands(page)} >= set(DOORS) - {"convert"}


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
