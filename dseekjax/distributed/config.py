"""How the processes of a run find each other."""

from typing import Self

from pydantic import Field, model_validator

from dseekjax.section import Section


class DistributedConfig(Section):
    coordinator_address: str | None = Field(
        None,
        description="HOST:PORT of process 0, the port a free one; null takes JAX_COORDINATOR_ADDRESS, or asks Slurm, "
        "Kubernetes or Open MPI.",
    )
    num_processes: int | None = Field(
        None,
        gt=0,
        description="Processes of the run, 1 to run alone whatever the environment says; null takes JAX_NUM_PROCESSES, "
        "or asks.",
    )
    process_id: int | None = Field(
        None, ge=0, description="Which of them this one is, from 0; null takes JAX_PROCESS_ID, or asks."
    )
    timeout: int = Field(300, gt=0, description="Seconds that a process waits for the others to come.")
    heartbeat_timeout: int = Field(
        100, gt=0, description="Seconds without a sign of life after which a process counts as dead, and all end."
    )

    @model_validator(mode="after")
    def _id_is_one_of_them(self) -> Self:
        if self.num_processes is not None and self.process_id is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id {self.process_id} is none of distributed.num_processes {self.num_processes}; they count "
                "from 0"
            )
        return self
