"""The start of whatever uses a config's devices."""

from dseekjax.config import Config, flat_config
from dseekjax.distributed.join import join
from dseekjax.platform import prepare_platform


def start_jax(config: Config, *, keeps_programs: bool = True) -> None:
    """Makes devices known: this machine's, and those of the other processes of the run.

    Args:
        config: of whatever is about to run.
        keeps_programs: whether compiled programs are kept for the next start.

    Raises:
        UserError: JAX has started with other devices, or a process is missing or has another config.
    """
    prepare_platform(config.run.virtual_devices, config.run.compilation_cache_dir if keeps_programs else None)
    # How each process finds the others is its own affair.
    shared = {key: value for key, value in flat_config(config).items() if not key.startswith("distributed.")}
    join(config.distributed, shared)
