"""A small Llama, compiled for eight H100s that are not there."""

import json
import re
import subprocess
import sys

import jax
import pytest
import yaml

import dseekjax.plan.__main__ as door
from dseekjax.config import load_config
from dseekjax.plan import compile_report
from dseekjax.plan.cluster import load_cluster
from dseekjax.plan.compile import WORKER
from dseekjax.plan.request import Request
from dseekjax.training.program import build_program
from tests.conftest import REPOSITORY
from tests.tiny import LLAMA, OVERRIDES

pytestmark = pytest.mark.cuda_compiler
GOLDEN = REPOSITORY / "tests" / "golden" / "plan_llama_8_h100.yaml"
SIZES = (
    "model.num_layers=6",
    "model.embed_dim=512",
    "model.attention.num_heads=8",
    "model.attention.num_kv_heads=4",
    "model.attention.head_dim=64",
    "model.feed_forward.hidden_dim=1536",
    "model.vocabulary_size=2048",
    "model.loss_chunk=512",
    "data.sequence_length=64",
    "precision.compute_dtype=bfloat16",
    "memory.recompute=full",
    "mesh.data=2",
    "mesh.fsdp=4",
)
KEYS = (*OVERRIDES, *LLAMA, *SIZES)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The report, and the HLO text that is kept."""
    hlo = tmp_path_factory.mktemp("plan") / "hlo.txt"
    return compile_report(load_config(None, KEYS), "h100_sxm", hlo=hlo), hlo.read_text()


def test_memory_and_collectives_are_the_golden_ones(compiled, request):
    report, _ = compiled
    found = {
        "memory": {
            name: getattr(report, name)
            for name in ("argument_bytes", "output_bytes", "aliased_bytes", "temporary_bytes", "peak_bytes")
        },
        "collectives": {
            f"{row.kind} {row.axes}": {"count": row.count, "payload_bytes": row.payload_bytes}
            for row in report.collectives
        },
        "compiled_flops": report.compiled_flops,
    }
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(yaml.safe_dump(json.loads(json.dumps(found)), sort_keys=False))
    golden = yaml.safe_load(GOLDEN.read_text())
    assert found["memory"] == pytest.approx(golden["memory"], rel=0.02)
    assert found["collectives"] == golden["collectives"]
    assert found["compiled_flops"] == golden["compiled_flops"]


def test_collectives_are_what_theory_says(compiled):
    """Parameters of a layer are gathered forward and again for recomputation; gradients scattered, then summed."""
    report, _ = compiled
    program = build_program(load_config(None, KEYS), 8)
    params = program.state_shape.params

    def sharded(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree) if "fsdp" in str(leaf.sharding.spec))

    # Rows of the table of tokens are looked up where they are, so it is not gathered, nor is its gradient reduced.
    outer = sharded({name: params[name] for name in params if name not in ("runs", "token_embedding")})
    layers, table = sharded(params["runs"]), sharded(params["token_embedding"])
    rows = {(row.kind, row.axes): row for row in report.collectives}
    # In bfloat16; a few integers of the batch are gathered beside them.
    assert rows["all-gather", "fsdp"].payload_bytes == pytest.approx(2 * (2 * layers + outer), rel=0.01)
    scattered = rows["reduce-scatter", "fsdp"].payload_bytes
    assert scattered == pytest.approx(2 * (layers + outer), rel=0.01)
    # Each GPU's part of the gradients, in float32, and a few sums.
    assert rows["all-reduce", "data"].payload_bytes == pytest.approx(4 * (layers + outer + table) / 4, rel=0.01)
    assert not any(row.crosses_hosts for row in report.collectives)
    assert {row.group_size for row in report.collectives} <= {2, 4, 8}


def test_the_compiled_program_does_the_flops_of_the_traced_one(compiled):
    report, _ = compiled
    assert report.compiled_flops == pytest.approx(report.program_flops, rel=0.01)
    # Recomputation is a third forward pass; the model's own count leaves it out.
    assert 1.2 < report.program_flops / report.model_flops < 1.5


def test_the_output_table_is_through_before_the_layers_are_differentiated(compiled):
    """Else its whole gradient, which is large, would wait beside them for its reduction."""
    _, text = compiled
    entry = text[text.index("\nENTRY") :].splitlines()
    (table,) = (i for i, line in enumerate(entry) if re.search(r"= bf16\[2048,128\]\S* reduce-scatter", line))
    *_, layers = (i for i, line in enumerate(entry) if " while(" in line)
    assert table < layers


def test_state_is_aliased_and_text_is_kept(compiled):
    report, text = compiled
    assert report.aliased_bytes > 0.99 * report.output_bytes
    assert report.live_peak_bytes <= report.peak_bytes
    assert (report.gpus, report.mesh["data"], report.mesh["fsdp"]) == (8, 2, 4)
    assert any("triton gemm" in name or "cublas" in name for name in report.kernels)
    assert text.startswith("HloModule")
    assert len(jax.devices("cpu")) == 8  # JAX in this process is as it was.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["mesh.data=3", "mesh.fsdp=1"], "mesh.data 3 does not divide the 8 devices"),
        (["train.global_batch_size=12"], "train.global_batch_size 12 does not divide into 8 replicas"),
    ],
)
def test_what_does_not_fit_the_cluster_is_one_sentence(changes, message, capfd, tmp_path):
    (tmp_path / "tiny.yaml").write_text("{}")
    config = ["--config", str(tmp_path / "tiny.yaml")]
    assert door.main(["compile", "--cluster", "h100_sxm", *config, *KEYS, *changes]) == 2
    (error,) = [line for line in capfd.readouterr().err.splitlines() if not line.endswith("…")]
    assert error.startswith(f"error: {message}")


def test_the_compiling_process_ends_with_the_one_that_asked():
    request = Request(
        program="small",
        config=load_config(None, KEYS),
        cluster_name="h100_sxm",
        cluster=load_cluster("h100_sxm"),
        hosts=1,
    )
    command = [sys.executable, *WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True) as worker:
        worker.stdin.write(request.model_dump_json() + "\n")
        worker.stdin.flush()
        assert json.loads(worker.stdout.readline()) == {"stage": "building the program for 1 host"}
        worker.stdin.close()
        assert worker.wait(timeout=60) == 1
        assert "report" not in worker.stdout.read()


def test_a_target_that_xla_does_not_take_is_one_sentence(capfd, tmp_path):
    (tmp_path / "bad.txtpb").write_text("not: a target")
    values = yaml.safe_load((REPOSITORY / "configs" / "clusters" / "h100_sxm.yaml").read_text())
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values | {"target": "bad.txtpb"}))
    assert door.main(["compile", "--model", "quickstart", "--cluster", str(tmp_path / "own.yaml")]) == 2
    (error,) = [line for line in capfd.readouterr().err.splitlines() if not line.endswith("…")]
    assert error.startswith("error: --cluster: target ")
    assert "XLA does not take it" in error
