"""Which attention a program runs."""

from collections.abc import Sequence

import jax

from dseekjax.config import Config
from dseekjax.errors import UserError
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.order import is_zigzag
from pallas_kernels.attention import AttentionCase, AttentionSpec, ImplementationName, choose_implementation
from pallas_kernels.dispatch import Device, device_of

SPLIT_BY_XLA = ("blocked", "reference")
"""What is made of operations that XLA knows; the others are kernels, which it would run whole on every device."""


def attention_name(config: Config, layout: Layout, devices: Sequence[jax.Device] | int) -> ImplementationName:
    """What `model.attention.implementation` stands for on `devices`.

    Raises:
        UserError: that cannot run there, or not with sequences that are split as these are.
    """
    device = Device("cpu") if isinstance(devices, int) else device_of(devices[0])
    size, length = config.model.attention, config.data.sequence_length
    case = AttentionCase(
        dtype=config.precision.compute_dtype,
        query_length=length,
        key_length=length,
        head_dim=size.head_dim,
        value_dim=size.head_dim,
        segmented=True,
        spec=AttentionSpec(causal=True, window=None, scale=size.head_dim**-0.5, softcap=None),
    )
    if is_zigzag(config.mesh, layout):
        if size.implementation not in ("auto", *SPLIT_BY_XLA):
            raise UserError(
                f"model.attention.implementation {size.implementation} takes whole sequences, and "
                f"mesh.context_attention {config.mesh.context_attention} computes attention in parts of its own; set "
                "the one to auto or the other to all_to_all"
            )
        # Not called there.
        return "reference"
    try:
        return choose_implementation(case, device, size.implementation)
    except ValueError as error:
        raise UserError(
            f"model.attention.implementation {size.implementation} cannot be had: {error}; auto takes what can run"
        ) from error
