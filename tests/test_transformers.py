"""Hugging Face's own library and ours, on the same checkpoints: logits, a step of training, and back."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dseekjax.checkpoint.hugging_face.families import describe
from dseekjax.checkpoint.hugging_face.reading import import_parameters
from dseekjax.checkpoint.hugging_face.tensor_files import TensorFiles
from dseekjax.checkpoint.hugging_face.writing import export_parameters
from dseekjax.checkpoint.layout import flatten
from dseekjax.config import load_config
from dseekjax.convert import main
from dseekjax.models.batch import Batch
from dseekjax.models.decoder import Decoder
from dseekjax.models.operations import local_operations
from dseekjax.trained import Trained, open_trained
from dseekjax.training.program import build_program
from dseekjax.training.state import TrainState
from tests.conftest import REPOSITORY, TRANSFORMERS_PYTHON
from tests.models.test_decoder import run_layers

pytestmark = pytest.mark.transformers

FAMILIES = {
    "gpt2": (),
    "gpt2_untied": (),
    "llama": ("--shard-size", "40KB"),
    "llama_biases": (),
    "mistral": ("--dtype", "bfloat16"),
    "qwen2": (),
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt2_untied": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "llama_biases": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
ROWS, LENGTH = 8, 24
LENGTHS = np.array([24, 1, 7, 13, 24, 20, 2, 18])
# A large epsilon: without it the first step of Adam is the sign of the gradient, be that zero but for rounding.
STEP = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.2, "clip_norm": 0.5}
# Added to every key alike, it changes no weight of attention; rotations make it one of a place.
WITHOUT_GRADIENT = {"learned": ("runs.0.attention.key.bias",)}


def reference(*commands):
    """Runs commands of tests/references/hugging_face.py in one process; returns what they print."""
    words = [str(word) for command in commands for word in ("+", *command)][1:]
    script = REPOSITORY / "tests" / "references" / "hugging_face.py"
    done = subprocess.run([TRANSFORMERS_PYTHON, script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What the reference makes of every family, one process for all: loading torch takes longer than its work."""
    root = tmp_path_factory.mktemp("transformers")
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 96, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = (rng.random((ROWS, LENGTH)) < 0.8).astype(np.float32)
    np.savez(root / "tokens.npz", tokens=tokens[:, :-1])
    np.savez(root / "padded.npz", tokens=tokens[:, :-1], lengths=LENGTHS)
    np.savez(root / "batch.npz", tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_weights=weights)
    options = [word for key, value in STEP.items() for word in (f"--{key.replace('_', '-')}", value)]
    commands = []
    for name, more in FAMILIES.items():
        folder, stepped = root / name, root / f"{name}_stepped"
        commands += [
            ("make", "--family", name, "--out", folder, *more),
            ("logits", "--model", folder, "--tokens", root / "tokens.npz", "--out", root / f"{name}.npz"),
            ("logits", "--model", folder, "--tokens", root / "padded.npz", "--out", root / f"{name}_padded.npz"),
            ("step", "--model", folder, "--batch", root / "batch.npz", "--out", stepped, *options),
            ("logits", "--model", stepped, "--tokens", root / "tokens.npz", "--out", root / f"{name}_stepped.npz"),
        ]
    reference(*commands)
    return root


@dataclasses.dataclass(frozen=True)
class Ours:
    """What we make of a family."""

    run: Path
    """Imported by the door."""
    trained: Trained
    stepped: TrainState
    metrics: dict
    written: Path
    """The run, exported by the door."""
    written_anew: Path
    """The same, had it not been imported: with a `config.json` of our own."""
    stepped_written: Path
    """The parameters after a step."""


@pytest.fixture(scope="module")
def ours(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    return {name: make_ours(root, name, folder / name) for name in FAMILIES}


def make_ours(root, name, folder):
    overrides = [
        f"data.sequence_length={LENGTH}",
        f"train.global_batch_size={ROWS}",
        "model.loss_chunk=100",
        "run.compilation_cache_dir=null",
        "optimizer.schedule.kind=constant",
        *(f"optimizer.{key}={value}" for key, value in STEP.items()),
    ]
    run, written, written_anew, stepped_written = (folder / name for name in ("run", "written", "anew", "stepped"))
    assert main(["--from-hf", str(root / name), "--run", str(run), *overrides]) == 0
    assert main(["--run", str(run), "--to-hf", str(written), "--shard-size", "30KB"]) == 0
    shutil.copytree(run, folder / "scratch", ignore=shutil.ignore_patterns("hugging_face"))
    assert main(["--run", str(folder / "scratch"), "--to-hf", str(written_anew)]) == 0
    trained = open_trained(run)
    program = build_program(trained.config, jax.devices()[:1])
    state = dataclasses.replace(program.init(), params=jax.device_get(trained.params))
    state, metrics = program.train_step(state, one_document_per_row(**np.load(root / "batch.npz")))
    stepped_written.mkdir()
    export_parameters(state.params, describe(written).family, stepped_written)
    shutil.copyfile(written / "config.json", stepped_written / "config.json")
    return Ours(run, trained, state, metrics, written, written_anew, stepped_written)


@pytest.fixture(scope="module")
def read_again(root, ours):
    """What the reference says of what we write: logits of what is exported and of what took a step, and texts."""
    commands = []
    for name, made in ours.items():
        for folder in (made.written, made.written_anew, made.stepped_written):
            commands.append(
                ("logits", "--model", folder, "--tokens", root / "tokens.npz", "--out", folder / "logits.npz")
            )
        for folder in (root / name, made.written):
            commands.append(("encode", "--model", folder, "--text", "w3 w4"))
    lines = iter(reference(*commands).splitlines())
    return {name: [[next(lines), next(lines)] for _ in range(2)] for name in ours}


def given(path):
    return np.load(path)["logits"]


def one_document_per_row(**fields):
    shape = fields["tokens"].shape
    plain = {
        "targets": np.zeros(shape, np.int32),
        "loss_weights": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    }
    return Batch(**{**plain, **fields})


def logits(config, params, **fields):
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, local_operations(), nnx.Rngs(0))))[0]
    batch = one_document_per_row(**fields)

    @jax.jit
    def forward(params, batch):
        model = nnx.merge(graphdef, params)
        return model.unembed(run_layers(model, batch))

    return np.asarray(forward(jax.device_get(params), batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_full_padded_and_packed_rows(root, ours, family):
    config, params = ours[family].trained.config, ours[family].trained.params
    tokens, theirs = np.load(root / "tokens.npz")["tokens"], given(root / f"{family}.npz")
    np.testing.assert_allclose(logits(config, params, tokens=tokens), theirs, atol=1e-4)
    assert np.ptp(theirs) > 1

    there = np.arange(LENGTH) < LENGTHS[:, None]
    padded = logits(config, params, tokens=np.where(there, tokens, 0), segment_ids=there.astype(np.int32))
    np.testing.assert_allclose(padded[there], given(root / f"{family}_padded.npz")[there], atol=1e-4)

    # The beginning of one row and then that of the next: each as if it were alone.
    rows = (np.arange(ROWS)[:, None] + np.where(there, 0, 1)) % ROWS
    positions = np.where(there, np.arange(LENGTH), np.arange(LENGTH) - LENGTHS[:, None]).astype(np.int32)
    packed = logits(
        config,
        params,
        tokens=tokens[rows, positions],
        segment_ids=np.where(there, 1, 2).astype(np.int32),
        positions=positions,
    )
    np.testing.assert_allclose(packed, theirs[rows, positions], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_training_and_back(root, ours, read_again, family):
    made = ours[family]
    assert float(made.metrics["loss"]) == pytest.approx(
        float(np.load(root / f"{family}_stepped/loss.npz")["loss"]), abs=1e-5
    )
    assert float(made.metrics["grad_norm"]) > STEP["clip_norm"]
    files = TensorFiles(root / f"{family}_stepped")
    expected = flatten(import_parameters(files, describe(made.written).family, made.trained.program.state_shape.params))
    before = flatten(jax.device_get(made.trained.params))
    for name, array in flatten(made.stepped.params).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-4, err_msg=name)
        if name not in WITHOUT_GRADIENT.get(made.trained.config.model.positions, ()):
            assert np.abs(array - before[name]).max() > 1e-3, name
    again = given(made.stepped_written / "logits.npz")
    np.testing.assert_allclose(again, given(root / f"{family}_stepped.npz"), atol=1e-4)
    assert np.abs(again - given(root / f"{family}.npz")).max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_the_door_writes(root, ours, read_again, family):
    written = ours[family].written
    np.testing.assert_allclose(given(written / "logits.npz"), given(root / f"{family}.npz"), atol=1e-6)
    theirs, again = read_again[family]
    assert theirs == again
    assert "w3 w4" in again
    assert describe(written).values["architectures"] == [ARCHITECTURES[family]]
    anew = ours[family].written_anew
    np.testing.assert_allclose(given(anew / "logits.npz"), given(root / f"{family}.npz"), atol=1e-6)
    assert describe(anew).family.architecture == ARCHITECTURES[family].replace("Mistral", "Llama")
    assert len(list(written.glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_meshes_hold_the_same(root, ours, family):
    made = ours[family]
    files, kind = TensorFiles(root / family), describe(root / family).family
    for overrides, devices in (((), 1), (("mesh.fsdp=4", "mesh.tensor=2"), 8), (("mesh.data=2", "mesh.context=2"), 8)):
        program = build_program(load_config(made.run / "config.yaml", overrides), jax.devices()[:devices])
        params = import_parameters(files, kind, program.state_shape.params)
        jax.tree.map(np.testing.assert_array_equal, params, made.trained.params)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_mesh_gives_their_loss(root, ours, family):
    trained = open_trained(ours[family].run, ("mesh.fsdp=4", "mesh.tensor=2"))
    state = dataclasses.replace(trained.program.init(), params=trained.params)
    sums = trained.program.eval_step(state, one_document_per_row(**np.load(root / "batch.npz")))
    expected = float(np.load(root / f"{family}_stepped/loss.npz")["loss"])
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(expected, abs=1e-5)
