"""The planner's door, and what people read, without a compiler."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import dseekjax.plan.__main__ as door
from dseekjax.errors import UserError
from dseekjax.plan import compile as compiling
from dseekjax.plan.analysis import memory_fields, schedule_fields
from dseekjax.plan.cluster import load_cluster
from dseekjax.plan.compile import HARMLESS
from dseekjax.plan.groups import Topology
from dseekjax.plan.hlo import parse_hlo
from dseekjax.plan.render import print_report
from dseekjax.plan.report import CollectiveRow, Report
from tests.conftest import REPOSITORY

CLUSTER = load_cluster("h100_sxm")


def report(temporary_bytes=2 * 2**30, host_bytes=0, hlo="loop"):
    memory = SimpleNamespace(
        argument_size_in_bytes=1000,
        output_size_in_bytes=900,
        alias_size_in_bytes=800,
        temp_size_in_bytes=temporary_bytes,
        generated_code_size_in_bytes=70,
        host_argument_size_in_bytes=host_bytes,
        host_output_size_in_bytes=0,
        host_temp_size_in_bytes=0,
        host_alias_size_in_bytes=0,
        peak_memory_in_bytes=1000,
    )
    module = parse_hlo((REPOSITORY / "tests" / "plan" / "hlo" / f"{hlo}.hlo").read_text())
    topology = Topology({"data": 2, "fsdp": 8}, [0] * 8 + [1] * 8)
    return Report(
        program="tiny",
        cluster="h100_sxm",
        gpu=CLUSTER.gpu,
        hosts=2,
        gpus_per_host=8,
        gpus=16,
        mesh={"data": 2, "fsdp": 8},
        global_batch_size=32,
        sequence_length=64,
        **memory_fields(memory, CLUSTER),
        **schedule_fields(module, topology, CLUSTER),
        model_flops=1e9,
        program_flops=2e9,
        dollars_per_hour=48.0,
        build_seconds=0.1,
        lower_seconds=0.2,
        compile_seconds=3.0,
        versions={"jax": "0.12"},
    )


def printed(report):
    output = io.StringIO()
    print_report(report, Console(file=output, width=100))
    return output.getvalue()


def test_peak_is_what_must_be_there_at_once():
    found = report()
    assert found.peak_bytes == 1000 + 900 - 800 + 2 * 2**30 + 70
    assert found.spare_bytes == CLUSTER.memory_bytes - CLUSTER.reserved_bytes - found.peak_bytes
    assert found.fits
    assert not report(temporary_bytes=CLUSTER.memory_bytes - CLUSTER.reserved_bytes).fits
    assert report(temporary_bytes=CLUSTER.memory_bytes - CLUSTER.reserved_bytes - 1170).fits


def test_sums_of_collectives():
    found = report()
    gather = 15 * 64 * 32 * 2 * 7 / 8
    over_data, over_all = 4000, 2 * 4000 * 15 / 16
    assert found.wire_bytes_within_hosts == gather
    assert found.wire_bytes_across_hosts == over_data + over_all
    assert found.exposed_share == pytest.approx((gather + over_all) / (gather + over_data + over_all))
    assert found.exposed_share_by_axes == {"fsdp": 1, "data": 0, "data+fsdp": 1}
    assert found.exposed_seconds <= found.communication_seconds


def test_a_report_reads_well():
    text = printed(report())
    assert "It fits: 2 GiB of 77.1 GiB (79.1 GiB less 2 GiB for CUDA and NCCL), 3%." in text
    assert "15 triton gemm fusion" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\x1b" not in text
    too_large = " ".join(printed(report(temporary_bytes=100 * 2**30)).split())
    assert "Out of memory: 100 GiB of 77.1 GiB" in too_large
    assert "22.9 GiB too much per GPU" in too_large
    tight = " ".join(printed(report(temporary_bytes=70 * 2**30)).split())
    assert "run it with XLA_PYTHON_CLIENT_MEM_FRACTION=0.974." in tight
    assert "MEM_FRACTION" not in text + too_large
    assert "on the host 3 KiB" in " ".join(printed(report(host_bytes=3072)).split())


def test_json_has_the_documented_fields_and_loads_again():
    found = report()
    values = json.loads(found.model_dump_json())
    assert Report.model_validate(values) == found
    assert list(values) == list(Report.model_fields)
    for model in (Report, CollectiveRow):
        assert all(field.description for field in model.model_fields.values())
    flat = (str, int, float, bool)
    assert all(isinstance(value, (*flat, dict)) for name, value in values.items() if name != "collectives")
    assert all(isinstance(value, flat) for row in values["collectives"] for value in row.values())


@pytest.fixture
def compiled(monkeypatch):
    """Puts a report in the place of the compiler; gives what it was asked."""
    asked = {}

    def answer(config, cluster, hosts, **options):
        asked.update(options, config=config, cluster=cluster, hosts=hosts)
        return asked.get("answer") or report()

    monkeypatch.setattr(door, "compile_report", answer)
    return asked


def test_the_door_prints_a_report_and_tells_by_its_status_whether_it_fits(compiled, capsys):
    arguments = ["compile", "--model", "gpt2_124m", "--cluster", "h100_sxm"]
    assert door.main([*arguments, "--mesh", "data=2,fsdp=4", "train.steps=700", "--hosts", "3"]) == 0
    assert "It fits" in capsys.readouterr().out
    config = compiled["config"]
    assert (config.mesh.data, config.mesh.fsdp, config.train.steps) == (2, 4, 700)
    # Words for keys may come before and after options.
    assert (compiled["program"], compiled["hosts"]) == ("gpt2_124m", 3)
    compiled["answer"] = report(temporary_bytes=2**40)
    assert door.main(["compile", "train.steps=800", "--json", *arguments[1:]]) == 3
    assert Report.model_validate_json(capsys.readouterr().out) == compiled["answer"]
    assert (compiled["config"].train.steps, compiled["hosts"]) == (800, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "h1000"], "there is no cluster h1000; there are a100_80gb"),
        (["--hosts", "0"], "--hosts 0 is no number of hosts"),
        (["--hosts", "many"], "--hosts many is no number of hosts"),
        (["--mesh", "fsdp:8"], "'fsdp:8' is not of the form AXIS=SIZE"),
        (["--mesh", "fspd=8"], "unknown key mesh.fspd; did you mean mesh.fsdp?"),
        (["--hlo", "/dev/null"], "--hlo: /dev/null is no regular file"),
        (["--hlo", "/proc/nowhere/hlo.txt"], "--hlo: cannot write /proc/nowhere/hlo.txt (No such file or directory)"),
        (["--config", "own.yaml"], "--config own.yaml and --model quickstart are both given; keep one of them"),
        (["--jsn"], "there is no option --jsn"),
        (["model.dim=8"], "did you mean model.embed_dim?"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(arguments, message, capsys):
    cluster = [] if "--cluster" in arguments else ["--cluster", "h100_sxm"]
    assert door.main(["compile", "--model", "quickstart", *cluster, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("pallas_kernels.compile_only.PLUGINS", ("jax_plugins.none_such",))
    assert door.main(["compile", "--model", "quickstart", "--cluster", "h100_sxm"]) == 2
    error = capsys.readouterr().err
    assert 'pip install "dseekjax[cuda12]"' in error
    assert error.count("\n") == 1


def worker(monkeypatch, code):
    """Puts a few lines of Python in the place of the process that compiles."""
    monkeypatch.setattr(compiling, "require_compiler", lambda: None)
    monkeypatch.setattr(compiling, "WORKER", ("-c", f"import sys; sys.stdin.readline(); {code}"))


def test_what_goes_wrong_in_the_other_process_is_told(monkeypatch, capfd):
    arguments = ["compile", "--model", "quickstart", "--cluster", "h100_sxm"]
    worker(monkeypatch, """print('{"stage": "working"}'); print('{"error": "mesh.data 3 is wrong"}'); sys.exit(2)""")
    assert door.main(arguments) == 2
    assert capfd.readouterr().err == "working …\nerror: mesh.data 3 is wrong\n"

    noise = "E1129 cuda_executor.cc:1] failed call to cuInit: CUDA_ERROR_NO_DEVICE"
    worker(monkeypatch, f"print({noise!r}, file=sys.stderr); sys.exit('XLA broke')")
    assert door.main(arguments) == 1
    error = capfd.readouterr().err
    assert "XLA broke" in error
    assert "error: the compiling process ended with status 1" in error
    assert "cuInit" not in error


@pytest.mark.parametrize("line", ["F0000 Check failed: device", "RESOURCE_EXHAUSTED", "ptxas fatal", "Traceback"])
def test_errors_are_not_taken_for_harmless(line):
    assert not HARMLESS.search(line)


def test_help_loads_no_jax_and_names_every_field():
    code = """
import sys
from dseekjax.plan.__main__ import main
try:
    main(["compile", "--help"])
finally:
    assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert "AssertionError" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert all(f"  {name}\n" in done.stdout for name in Report.model_fields)
    assert all(f"  collectives[].{name}\n" in done.stdout for name in CollectiveRow.model_fields)
    assert "Exit status: 0 it fits, 3 it compiles but does not fit" in done.stdout


def test_the_library_offers_it():
    import dseekjax.plan

    assert dseekjax.plan.compile_report is compiling.compile_report
    assert dseekjax.plan.Report is Report
    with pytest.raises(UserError, match="no cluster nowhere"):
        dseekjax.plan.compile_report(None, "nowhere")
