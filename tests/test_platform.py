"""What is settled before a run starts: threads, memory, and where compiled programs are kept."""

import os
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from dseekjax import allocator, platform
from dseekjax.allocator import Allocator, best_allocator, restart_with
from dseekjax.errors import UserError
from tests.tiny import door_arguments


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 64), ("150000 100000", 2), ("9900000 100000", 64), ("nonsense", 64)]
)
def test_cores_are_those_of_the_containers_share(text, cores, tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(platform, "CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert platform.available_cores() == cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without huge pages, tcmalloc or wishes; returns what gives it the one or the other."""
    switch, folder = tmp_path / "enabled", tmp_path / "lib"
    folder.mkdir()
    switch.write_text("always madvise [never]\n")
    monkeypatch.setattr(allocator, "KERNEL_SWITCH", switch)
    monkeypatch.setattr(allocator, "LIBRARY_FOLDERS", (str(folder),))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return switch, folder


def test_huge_pages_come_before_tcmalloc_and_tcmalloc_before_a_hint(machine, monkeypatch):
    switch, folder = machine
    found = best_allocator()
    assert found.environment == {}
    assert "libtcmalloc-minimal4" in found.hint
    library = folder / "libtcmalloc_minimal.so.4"
    library.touch()
    assert best_allocator() == Allocator("tcmalloc", {"LD_PRELOAD": str(library)})
    switch.write_text("always [madvise] never\n")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")
    expected = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"}
    assert best_allocator() == Allocator("glibc with huge pages", expected)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.31"))
    assert best_allocator().name == "tcmalloc"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert best_allocator() == Allocator("the system's allocator", {})


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("LD_PRELOAD", "/opt/libjemalloc.so.2", "jemalloc"),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0", "glibc"),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2", "glibc with huge pages"),
    ],
)
def test_what_the_user_has_set_stays(variable, value, name, machine, monkeypatch):
    switch, _ = machine
    switch.write_text("[always] madvise never\n")
    monkeypatch.setenv(variable, value)
    assert best_allocator() == Allocator(name, {})
    assert allocator.allocator_in_force() == name


def test_a_restart_repeats_the_command_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from dseekjax.allocator import Allocator, restart_with\n"
        "print('started', sys.argv[1:], sys.flags.utf8_mode, flush=True)\n"
        "mark = os.environ.pop('MARK', None)  # as a loader does that strips it\n"
        "restart_with(Allocator('x', {'MARK': 'a b'}))\n"
        "print('went on with', mark)\n"
    )
    command = [sys.executable, "-X", "utf8", str(script), "two words", "*"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["started ['two words', '*'] 1"] * 2 + ["went on with a b"]


def test_nothing_to_choose_is_no_restart(monkeypatch):
    monkeypatch.setattr(os, "execve", None)
    restart_with(Allocator("x", {}))


def test_a_command_restarts_itself_and_finds_its_programs_again(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    command = [
        *(sys.executable, "-m", "dseekjax.train", *door_arguments(tmp_path)),
        *("model.embed_dim=64", "train.steps=2", f"run.compilation_cache_dir={programs}"),
    ]
    for name in ("XLA_FLAGS", "GLIBC_TUNABLES", "LD_PRELOAD", "NPROC"):
        monkeypatch.delenv(name, raising=False)

    def run(*more, quiet=True):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, check=True)
        assert not (quiet and done.stderr)
        return done.stdout + done.stderr

    def kept():
        return {path.name for path in programs.iterdir() if "jit_train" in path.name and "atime" not in path.name}

    expected = best_allocator()
    line = next(line for line in run().splitlines() if line.startswith("on CPU"))
    assert (expected.name if expected.environment else "allocator") in line
    assert f" {platform.available_cores()} threads, a loop over layers" in line
    assert "prefer_vector_width 512" in line
    first = kept()
    assert len(first) == 1
    assert "run.tune_cpu is false" in run("--fresh", "run.tune_cpu=false")
    second = kept()
    assert len(second) == 2  # other options are another program
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")
    monkeypatch.setenv("JAX_LOGGING_LEVEL", "DEBUG")
    assert "Persistent compilation cache hit for 'jit_train'" in run("--fresh", quiet=False)
    assert kept() == second


def test_the_users_own_cache_goes_first(tmp_path):
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        platform.prepare_platform(0, str(tmp_path / "other"))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run.compilation_cache_dir .*/file/x: cannot write there \(Not a directory\)"):
        platform.prepare_platform(0, str(tmp_path / "file" / "x"))
    assert jax.config.jax_compilation_cache_dir is None


def test_threads_can_be_told(monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    platform.prepare_platform(0)
    assert os.environ["NPROC"] == "3"
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(platform, "available_cores", lambda: 5)
    platform.prepare_platform(0)
    assert os.environ["NPROC"] == "5"
