"""Runs as processes of their own: killed, told to stop, out of disk, and several together."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from dseekjax.checkpoint.store import latest_step
from dseekjax.train import main
from tests.tiny import compared_records, door_arguments


def command_in(folder):
    """The command line of a run; `run` is the name of its directory."""
    arguments = [
        *(sys.executable, "-m", "dseekjax.train", *door_arguments(folder)),
        *("train.steps=20", "optimizer.schedule.kind=constant", "insight.print_every_steps=1"),
        # Large steps multiply what sums in another order differ by, until it is more than that.
        "optimizer.learning_rate=0.003",
    ]
    return lambda *overrides, run="run": [*arguments, f"run.dir={folder / run}", *overrides]


@pytest.fixture
def command(tmp_path):
    return command_in(tmp_path)


@pytest.fixture(scope="module")
def records_of_one_device(tmp_path_factory):
    """Of more steps than any run here that is compared with them."""
    folder = tmp_path_factory.mktemp("one")
    arguments = command_in(folder)("run.virtual_devices=1", "train.steps=30")
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    return np.array(compared_records(folder / "run"))


def wait_for(condition, process, seconds=120):
    deadline = time.time() + seconds
    while not condition():
        assert process.poll() is None, "ended early"
        assert time.time() < deadline, "nothing happened"
        time.sleep(0.01)


def test_killed_in_a_save_and_while_stepping_the_result_is_the_same(command, tmp_path):
    often = ("train.steps=60", "checkpoint.every_steps=2", "evaluation.every_steps=60")
    subprocess.run(command(*often, run="calm"), check=True, stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "run" / "checkpoints"
    for condition in (
        lambda: len(compared_records(tmp_path / "run")) > 3,
        lambda: (latest_step(checkpoints) or 0) >= 6 and list(checkpoints.glob("*tmp*")),
    ):
        process = subprocess.Popen(command(*often), stdout=subprocess.DEVNULL)
        wait_for(condition, process)
        process.kill()
        process.wait()
    done = subprocess.run(command(*often), check=True, capture_output=True, text=True)
    assert "Resuming from step" in done.stdout
    assert compared_records(tmp_path / "run") == compared_records(tmp_path / "calm")
    sums = [
        json.loads((tmp_path / d / "checkpoints/60/meta/metadata").read_text())["checksums"] for d in ("run", "calm")
    ]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step_and_saves(command, tmp_path, number):
    process = subprocess.Popen(
        command("train.steps=100000"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: len(compared_records(tmp_path / "run")) > 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    step = latest_step(tmp_path / "run" / "checkpoints")
    assert f"Stopped after step {step}, which is saved" in output
    assert compared_records(tmp_path / "run")[-1][0] == step
    assert "Traceback" not in output


def test_a_disk_that_is_full_during_a_save_is_one_sentence(command, tmp_path):
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
    limited += "from dseekjax.train import main; sys.exit(main(sys.argv[1:]))"
    arguments = command("model.embed_dim=64", "checkpoint.every_steps=5")
    done = subprocess.run([sys.executable, "-c", limited, *arguments[3:]], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "error: cannot save a checkpoint to" in done.stderr
    assert "run again: training goes on from the start" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_processes_train_like_one_device_and_one_goes_on_alone(command, tmp_path, records_of_one_device):
    expected = records_of_one_device[:20]
    pair = command("run.virtual_devices=2", "mesh.data=2", "checkpoint.every_steps=10", run="pair")
    outputs = together(pair)
    assert outputs[0][0] == outputs[1][0] == 0, outputs
    compare(compared_records(tmp_path / "pair"), expected)
    shutil.rmtree(tmp_path / "pair" / "checkpoints" / "20")
    alone = command("run.virtual_devices=2", run="pair")
    done = subprocess.run(alone, check=True, capture_output=True, text=True)
    assert "Resuming from step 10" in done.stdout
    compare(compared_records(tmp_path / "pair"), expected)


def test_four_processes_are_stopped_and_two_of_slurm_go_on(command, tmp_path, records_of_one_device):
    def interrupt(processes):
        wait_for(lambda: len(compared_records(tmp_path / "run")) > 4, processes[0], seconds=300)
        processes[3].terminate()

    keys = [f"distributed.coordinator_address={free_address()}", "distributed.num_processes=4"]
    outputs = launch(
        [
            (
                command("run.virtual_devices=1", "mesh.data=2", "train.steps=30", *keys, f"distributed.process_id={i}"),
                {},
            )
            for i in range(4)
        ],
        interrupt,
    )
    assert {status for status, _ in outputs} == {128 + signal.SIGTERM}, outputs
    stopped = latest_step(tmp_path / "run" / "checkpoints")
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "2"),
    }
    arguments = command("run.virtual_devices=1", "train.steps=30")
    outputs = launch(
        [(arguments, {**slurm, **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(i))}) for i in range(2)]
    )
    assert [status for status, _ in outputs] == [0, 0], outputs
    assert f"Resuming from step {stopped}" in outputs[0][1]
    compare(compared_records(tmp_path / "run"), records_of_one_device)


def compare(found, expected):
    """Equal up to the order in which the sums of devices are added up, in 32 bits, and what training makes of that."""
    found = np.array(found)
    assert (found[:, 0] == expected[:, 0]).all()
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-5)
    np.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=1e-3)


def test_what_one_of_two_processes_refuses_both_do(command):
    for status, output in together(command("run.virtual_devices=1", "run.dir=/proc/nowhere")):
        assert status == 2, output
        assert "error: run.dir /proc/nowhere: cannot write there" in output
        assert "Traceback" not in output


def test_processes_with_different_configs_end_in_one_sentence(command):
    variables = by_hand(2)
    outputs = launch([(command(f"optimizer.learning_rate=0.0{i + 1}"), variables[i]) for i in range(2)])
    assert outputs[0] == outputs[1]
    status, output = outputs[0]
    assert status == 2, output
    assert output.startswith(
        "error: the processes have different configs: optimizer.learning_rate is 0.01 on process 0"
    )
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("process_id", "message"),
    [
        (0, "process 1 of 2 did not come to localhost:"),
        (1, "process 1 did not find the coordinator, which is process 0, at localhost:"),
        (None, "are set, but not distributed.process_id (or JAX_PROCESS_ID)"),
    ],
)
def test_a_process_whose_others_do_not_come_ends_in_one_sentence(tmp_path, process_id, message, capsys):
    keys = [f"distributed.coordinator_address={free_address()}", "distributed.num_processes=2", "distributed.timeout=1"]
    keys += [] if process_id is None else [f"distributed.process_id={process_id}"]
    assert main([*door_arguments(tmp_path), *keys]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(command, tmp_path, number):
    def interrupt(processes):
        wait_for(lambda: len(compared_records(tmp_path / "run")) > 2, processes[0])
        processes[1].send_signal(number)

    outputs = together(command("run.virtual_devices=1", "train.steps=100000"), interrupt)
    step = latest_step(tmp_path / "run" / "checkpoints")
    assert f"Stopped after step {step}, which is saved" in outputs[0][1]
    assert compared_records(tmp_path / "run")[-1][0] == step
    assert {status for status, _ in outputs} == {128 + signal.SIGTERM}


def together(arguments, meanwhile=lambda processes: None):
    """Exit status and output of two processes that know of each other."""
    return launch([(arguments, variables) for variables in by_hand(2)], meanwhile)


def by_hand(num_processes):
    """The variables that tell each process who it is."""
    shared = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": str(num_processes)}
    return [{**shared, "JAX_PROCESS_ID": str(number)} for number in range(num_processes)]


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def launch(commands, meanwhile=lambda processes: None):
    """Exit status and output of processes that run at the same time, given as arguments and variables."""
    processes = [
        subprocess.Popen(
            arguments,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments, variables in commands
    ]
    try:
        meanwhile(processes)
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
