"""One process becomes part of a run."""

import time
from collections.abc import Mapping
from typing import Any

from dseekjax.distributed.config import DistributedConfig
from dseekjax.distributed.membership import find_membership
from dseekjax.distributed.rendezvous import meet
from dseekjax.errors import UserError

JOIN_SECONDS = 60
"""What JAX is given once all are there, which takes moments; its client aborts after that, with words of its own."""


def join(config: DistributedConfig, settings: Mapping[str, Any]) -> None:
    """Makes the devices of all processes of the run known to each; does nothing for a process that runs alone.

    Call it before anything asks for devices.

    Args:
        config: how to find the others.
        settings: what has to be the same on all of them, by key; JSON values.

    Raises:
        UserError: the others do not come, they differ in `settings`, or it is not clear who they are.
    """
    deadline = time.monotonic() + config.timeout
    member = find_membership(config)
    if member is None:
        return
    meet(member, settings, max(deadline - time.monotonic(), 1.0))
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            member.coordinator_address,
            member.num_processes,
            member.process_id,
            local_device_ids=member.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except RuntimeError as error:
        raise UserError(
            f"process {member.process_id} met the others at {member.coordinator_address}, but JAX could not join them "
            f"({' '.join(str(error).split())}); run again"
        ) from error
