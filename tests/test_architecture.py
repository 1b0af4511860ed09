"""Who may import whom."""

import ast

import pytest

from tests.conftest import REPOSITORY

SHARED = {"door", "errors", "files", "section", "yaml_file"}
HOOKS = {"training.hooks", "training.state", "training.processes"}
ROOMS = {
    "models": {"pallas_kernels"},
    "parallel": {"models", "pallas_kernels"},
    "comms": {"pallas_kernels"},
    "distributed": set(),
    "precision": set(),
    "memory": set(),
    "optim": set(),
    "data": set(),
    "training": {
        "config",
        "platform",
        "allocator",
        "pallas_kernels",
        "models",
        "parallel",
        "comms",
        "precision",
        "memory",
        "optim",
    },
    "generation": {"config", "data.tokenizers", "training.inference", "trained"},
    "evaluation": {
        "data",
        "training.feed",
        "training.program",
        "training.run_directory",
        "trained",
        "generation",
    },
    "checkpoint": {*HOOKS, "models.config", "data.tokenizers"},
    "insight": HOOKS,
    "plan": {"config", "config_errors", "models.flops", "training.program", "pallas_kernels"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.split(".")[0] in ("dseekjax", "pallas_kernels"):
                yield name.removeprefix("dseekjax.")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_stands_below_it(room):
    allowed = {room, *SHARED, *ROOMS[room]}
    files = list((REPOSITORY / "dseekjax" / room).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            assert any(name == lower or name.startswith(f"{lower}.") for lower in allowed), f"{path} imports {name}"


def test_kernels_know_nothing_of_the_house():
    for path in (REPOSITORY / "pallas_kernels").rglob("*.py"):
        assert all(name.startswith("pallas_kernels") for name in imports(path))


def test_models_name_no_mesh_axis():
    words = {"fsdp", "tensor", "pipe", "PartitionSpec", "with_sharding_constraint"}
    for path in (REPOSITORY / "dseekjax" / "models").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            used = {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None)}
            assert not words & {word for word in used if isinstance(word, str)}, path
