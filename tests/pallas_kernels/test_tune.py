"""Block sizes: found, kept, and read by the kernels."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import __main__ as door
from pallas_kernels import tune, tuned
from pallas_kernels.attention.pallas import blocks
from pallas_kernels.gpus import gpu_names, load_gpu


def shapes(head_dim, value_dim, length=4096, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct((1, length, 2, dim), dtype) for dim in (head_dim, head_dim, value_dim)]


def test_sizes_are_those_of_the_signature_or_of_the_next_larger_heads():
    gpu = load_gpu("h100_sxm")
    entries = tuned.tuned_entries(gpu, "attention")
    kept = entries["bfloat16 head_dim=128 value_dim=128"]["blocks"]["forward"]
    for head_dim, dtype in ((128, jnp.bfloat16), (80, jnp.bfloat16), (128, jnp.float16)):
        assert blocks.choose_blocks(gpu, *shapes(head_dim, 128, dtype=dtype)).forward._asdict() == kept
    assert blocks.choose_blocks(gpu, *shapes(64, 64)) != blocks.choose_blocks(gpu, *shapes(192, 128))
    assert blocks.choose_blocks(gpu, *shapes(128, 128, dtype=jnp.float32)) == blocks.UNTUNED
    assert blocks.choose_blocks(None, *shapes(128, 128)) == blocks.UNTUNED


def test_no_block_is_larger_than_what_there_is():
    short = blocks.choose_blocks(load_gpu("h100_sxm"), *shapes(128, 128, length=1))
    assert {(kernel.queries, kernel.keys) for kernel in short} == {(16, 16)}


def test_a_kind_without_entries_has_those_of_its_like():
    assert tuned.tuned_entries(load_gpu("h200"), "attention") == tuned.tuned_entries(load_gpu("h100_sxm"), "attention")
    assert tuned.tuned_entries(load_gpu("b200"), "attention") == {}


def test_what_a_kind_measured_leaves_it_the_rest_of_its_like(somewhere_else):
    h100, h200 = load_gpu("h100_sxm"), load_gpu("h200")
    tuned.write_tuned_entries(h100.name, "attention", {"a": {"size": 1}, "b": {"size": 1}}, {})
    tuned.write_tuned_entries(h200.name, "attention", {"b": {"size": 2}}, {})
    sizes = {gpu.name: {k: e["size"] for k, e in tuned.tuned_entries(gpu, "attention").items()} for gpu in (h100, h200)}
    assert sizes["h200"] == {"a": 1, "b": 2}
    assert sizes["h100_sxm"] == {"a": 1, "b": 1}


@pytest.fixture
def somewhere_else(tmp_path, monkeypatch):
    for name in gpu_names():
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned._entries.cache_clear()
    yield tmp_path
    tuned._entries.cache_clear()


def test_what_is_found_is_kept_beside_what_there_was(somewhere_else):
    gpu = load_gpu("a100_80gb")
    tuned.write_tuned_entries(gpu.name, "attention", {"b": {"size": 1}, "a": {"size": 2}}, {"jax": "1"})
    tuned.write_tuned_entries(gpu.name, "attention", {"b": {"size": 3}}, {"jax": "2"})
    assert tuned.tuned_entries(gpu, "attention") == {
        "a": {"size": 2, "versions": {"jax": "1"}},
        "b": {"size": 3, "versions": {"jax": "2"}},
    }


@pytest.mark.cuda_compiler
def test_compiling_drops_what_does_not_fit_and_keeps_the_best(somewhere_else, monkeypatch, capsys):
    from pallas_kernels.attention import tuning

    candidates = [blocks.Blocks(*sizes) for sizes in ((32, 32, 4, 2), (128, 64, 8, 2), (64, 256, 8, 2))]
    monkeypatch.setattr(tuning, "candidates", lambda shape: candidates)
    monkeypatch.setattr(tuning, "PARTS", ("forward",))
    assert tune.main(["attention", "--gpu", "h100_sxm", "--shapes", "bfloat16 256 256"]) == 0
    kept = json.loads((somewhere_else / "h100_sxm" / "attention.json").read_text())["entries"]
    entry = kept["bfloat16 head_dim=256 value_dim=256"]
    assert entry["blocks"]["forward"] == {"queries": 128, "keys": 64, "num_warps": 8, "num_stages": 2}
    assert entry["source"] == "heuristic"
    assert "of 2 that fit" in capsys.readouterr().out


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("shape", ["two_products large", "grouped_product small", "qkv_rotary head_dim_64"])
def test_products_are_tuned_by_the_kernels_that_they_are_made_of(shape, somewhere_else, monkeypatch):
    from pallas_kernels.bf16_matmul import tuning

    few = [next(tuning.candidates(shape))]
    monkeypatch.setattr(tuning, "candidates", lambda shape: few)
    assert tune.main(["bf16_matmul", "--gpu", "h100_sxm", "--shapes", shape]) == 0
    kernel, size = shape.split()
    entry = tuned.tuned_entries(load_gpu("h100_sxm"), "bf16_matmul")[f"{kernel} 16_bit {size}"]
    assert entry["blocks"] == few[0]._asdict()


def test_what_is_tried_goes_before_the_table_and_only_there():
    from pallas_kernels.bf16_matmul import blocks as of_products

    tried = of_products.INTERPRETED._replace(rows=64)
    before = of_products.find_blocks("h100_sxm", "product", rows=4096, cols=4096)
    with of_products.trying(tried):
        assert of_products.find_blocks("h100_sxm", "product", rows=4096, cols=4096) == tried
        assert of_products.find_head_blocks("h100_sxm", 64) == tried
    assert of_products.find_blocks("h100_sxm", "product", rows=4096, cols=4096) == before


def test_measuring_takes_the_gpu(capsys):
    assert tune.main(["attention", "--gpu", "h100_sxm", "--measure"]) == 2
    assert "--measure: the device at hand is cpu, not h100_sxm" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["bfloat16 64", "bfloat16 0 64", "bfloat16 ² 64", "bfloat16 512 64", "int8 64 64"])
def test_shapes_that_are_none_are_one_sentence(shape, capsys):
    assert tune.main(["attention", "--gpu", "h100_sxm", "--shapes", shape]) == 2
    assert f"--shapes: {shape!r} is not " in capsys.readouterr().err


def test_a_gpu_without_kernels_is_one_sentence(capsys):
    assert tune.main(["attention", "--gpu", "b200"]) == 2
    assert "attention has no kernels for b200, of compute capability 10.0" in capsys.readouterr().err


def test_the_door_tells_what_runs_and_why_not_the_others(capsys):
    assert door.main(["--gpu", "a100_80gb"]) == 0
    said = capsys.readouterr().out
    assert "What `auto` stands for on NVIDIA A100-SXM4-80GB:" in said
    assert "causal, segments\n  pallas\n  not cudnn: takes no segment ids\n" in said
    assert door.main([]) == 0
    assert "not pallas: needs an NVIDIA GPU" in capsys.readouterr().out
