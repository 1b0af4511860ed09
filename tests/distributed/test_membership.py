import os

import pytest

from dseekjax.config import load_config
from dseekjax.distributed.config import DistributedConfig
from dseekjax.distributed.membership import Membership, find_membership
from dseekjax.errors import UserError

BY_HAND = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "4098",
    "SLURM_STEP_NODELIST": "node[007-008,011]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
SLURM_ADDRESS = f"node007:{65536 - 4096 + 2}"
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "pod"}


@pytest.fixture
def find(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_", "SLURM_", "OMPI_", "CUDA_VISIBLE", "KUBERNETES_", "JOB_COMPLETION_")):
            monkeypatch.delenv(name)

    def find(environment, **keys):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return find_membership(DistributedConfig(**keys))

    return find


@pytest.mark.parametrize(
    "environment",
    [
        {},
        POD,
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # The shell of an allocation of six tasks, which is a step of one.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # The same where the shell is no step, and in the script of `sbatch`.
        {key: value for key, value in SLURM.items() if not key.startswith("SLURM_STEP")},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_alone(find, environment):
    assert find(environment) is None


@pytest.mark.parametrize("environment", [BY_HAND, SLURM, OPEN_MPI, {**POD, "JOB_COMPLETION_INDEX": "1"}])
def test_one_process_is_alone_whatever_the_environment_says(find, environment):
    environment = {key: value for key, value in environment.items() if key != "JAX_PROCESS_ID"}
    assert find(environment, num_processes=1) is None


@pytest.mark.parametrize(
    ("environment", "keys", "expected"),
    [
        (BY_HAND, {}, Membership("a:1", 4, 3)),
        (BY_HAND, {"process_id": 0, "coordinator_address": "[::1]:22"}, Membership("[::1]:22", 4, 0)),
        ({}, {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}, Membership("a:1", 2, 1)),
        (SLURM, {}, Membership(SLURM_ADDRESS, 6, 4, (1,))),
        ({**SLURM, **BY_HAND}, {}, Membership("a:1", 4, 3)),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "b:2"}, {}, Membership("b:2", 6, 4, (1,))),
        ({**SLURM, "JAX_COORDINATOR_PORT": "77"}, {}, Membership("node007:77", 6, 4, (1,))),
        (OPEN_MPI, {"coordinator_address": "a:1"}, Membership("a:1", 4, 2, (1,))),
    ],
)
def test_keys_win_over_variables_and_variables_over_the_cluster(find, environment, keys, expected):
    assert find(environment, **keys) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_STEP_NUM_NODES": "6"},
        {"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "2,3"},
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"JAX_LOCAL_DEVICE_IDS": "0,1"},
    ],
)
def test_a_task_takes_all_that_it_sees_where_its_devices_are_its_own(find, more):
    assert find({**SLURM, **more}) == Membership(SLURM_ADDRESS, 6, 4)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1"},
            r"coordinator_address \(or JAX_COORDINATOR_ADDRESS\) is set, but not distributed.num_processes \(or "
            r"JAX_NUM_PROCESSES\) and distributed.process_id \(or JAX_PROCESS_ID\); set all three",
        ),
        ({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID.* is set, but not"),
        ({**BY_HAND, "JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES is 'four'; it must be a number from 1 on"),
        ({**BY_HAND, "JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is ''"),
        ({**BY_HAND, "JAX_PROCESS_ID": "4"}, "is 4, of 4 processes; they count from 0 to 3"),
        ({**BY_HAND, "JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES is '0'"),
        ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "a"}, "is 'a'; give it as HOST:PORT"),
        ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "a:65536"}, "give it as HOST:PORT"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}, "is set, but not"),
        ({**SLURM, "SLURM_PROCID": "x"}, "seems to be one of several.*'x'.*set distributed.coordinator_address"),
        ({**POD, "JOB_COMPLETION_INDEX": "1"}, "one of several.*distributed.num_processes=1 to run alone"),
    ],
)
def test_what_is_half_said_or_wrong_is_refused(find, environment, message):
    with pytest.raises(UserError, match=message):
        find(environment)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distributed.num_processes=2", "distributed.process_id=2"], "process_id 2 is none of .*num_processes 2"),
        (["distributed.timeout=0"], "distributed.timeout: 0 is wrong"),
    ],
)
def test_wrong_keys_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(overrides=overrides)
