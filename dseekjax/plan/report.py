"""What compiling for a cluster tells: the schema of `--json`."""

from pydantic import Field

from dseekjax.section import Section


class CollectiveRow(Section):
    """All collectives of one kind along the same mesh axes, in one step."""

    kind: str = Field(description="As XLA names it: all-gather, reduce-scatter, all-reduce …")
    axes: str = Field(description="Mesh axes along which the members of a group differ, joined by +.")
    group_size: int = Field(description="GPUs in a group.")
    crosses_hosts: bool = Field(description="Whether a group stands on more than one host.")
    is_conditional: bool = Field(description="Stands in a branch, and is counted as if that were always taken.")
    count: float = Field(description="How often one runs per step, loops multiplied out.")
    payload_bytes: float = Field(description="Size of the whole arrays per step, as NCCL counts them.")
    wire_bytes: float = Field(description="What one GPU sends per step: (n-1)/n of the payload, all-reduce twice that.")
    network_bytes: float = Field(description="The part of wire_bytes that leaves the host.")
    exposed_wire_bytes: float = Field(
        description="The part of wire_bytes with no matrix product between start and done; all, if synchronous."
    )
    seconds: float = Field(description="Estimated time on the wire per step, at full bandwidth.")
    exposed_seconds: float = Field(description="The part of it for which kernels wait, matrix products at peak speed.")


class Report(Section):
    """A program compiled for a cluster. Bytes and FLOPs are per GPU and step."""

    program: str = Field(description="The recipe or config file.")
    cluster: str = Field(description="Name or path of the cluster.")
    gpu: str = Field(description="Name of the GPU.")
    hosts: int = Field(description="Number of hosts.")
    gpus_per_host: int = Field(description="GPUs of a host.")
    gpus: int = Field(description="All GPUs.")
    mesh: dict[str, int] = Field(description="Size of every mesh axis.")
    global_batch_size: int = Field(description="Sequences per step.")
    sequence_length: int = Field(description="Tokens per sequence.")

    argument_bytes: int = Field(description="State and batch.")
    output_bytes: int = Field(description="New state and metrics.")
    aliased_bytes: int = Field(description="Output that takes the memory of arguments.")
    temporary_bytes: int = Field(description="Everything else while the step runs, as one allocation.")
    host_bytes: int = Field(description="Memory of the host that the program uses.")
    peak_bytes: int = Field(description="argument + output - aliased + temporary + machine code: what must be there.")
    live_peak_bytes: int = Field(description="The most that is in use at one moment, without gaps between buffers.")
    capacity_bytes: int = Field(description="Memory of a GPU.")
    reserved_bytes: int = Field(
        description="Kept free for CUDA, NCCL and libraries; an estimate of the cluster's file."
    )
    spare_bytes: int = Field(description="capacity - reserved - peak; negative if the program does not fit.")
    fits: bool = Field(description="Whether spare_bytes is not negative.")

    collectives: tuple[CollectiveRow, ...] = Field(description="By kind and axes, the largest first.")
    exposed_share: float = Field(description="exposed_wire_bytes of all collectives by wire_bytes of all.")
    exposed_share_by_axes: dict[str, float] = Field(description="The same for each value of axes.")
    wire_bytes_within_hosts: float = Field(description="Sum of wire_bytes of groups that stay within a host.")
    wire_bytes_across_hosts: float = Field(description="Sum of wire_bytes of groups that cross hosts.")
    model_flops: float = Field(description="What the model needs: causal attention half, nothing recomputed.")
    program_flops: float = Field(description="Matrix products of the program before XLA, shared out evenly.")
    compiled_flops: float = Field(description="Matrix products that XLA made each GPU do.")
    kernels: dict[str, float] = Field(description="How often each kind of kernel runs.")
    compute_seconds: float = Field(description="Estimate: compiled_flops at peak speed; what else runs is left out.")
    communication_seconds: float = Field(description="Estimate: all collectives at full bandwidth.")
    exposed_seconds: float = Field(description="Estimate: the part of it for which kernels wait.")
    unknown_loops: int = Field(description="Loops whose length the compiler did not know; counted as one pass.")

    dollars_per_hour: float | None = Field(description="All GPUs, at the price of the cluster's file, if it has one.")
    build_seconds: float = Field(description="From config to Program.")
    lower_seconds: float = Field(description="From Program to StableHLO.")
    compile_seconds: float = Field(description="From StableHLO to machine code.")
    versions: dict[str, str] = Field(description="Of the packages that decide.")
