"""What several processes have to agree on."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from dseekjax.errors import UserError

MESSAGE_BYTES = 4096


def on_first_process(action: Callable[[], None]) -> None:
    """Runs `action` on the first process while the others wait.

    Raises:
        UserError: if the action did; on every process, so that none is left waiting for the first.
    """
    if jax.process_count() == 1:
        action()
        return
    message = b""
    if jax.process_index() == 0:
        try:
            action()
        except UserError as error:
            message = str(error).encode()[:MESSAGE_BYTES]
    padded = np.frombuffer(message.ljust(MESSAGE_BYTES, b"\0"), np.uint8)
    message = multihost_utils.broadcast_one_to_all(padded).tobytes().rstrip(b"\0")
    if message:
        raise UserError(message.decode(errors="replace"))


def on_all_processes(good: bool) -> bool:
    """Whether `good` holds everywhere; the same answer on every process."""
    if jax.process_count() == 1:
        return good
    return bool(multihost_utils.process_allgather(np.int32(good)).min())
