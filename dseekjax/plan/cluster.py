"""What a GPU cluster is, as data: `configs/clusters/*.yaml`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from dseekjax.config_errors import explain
from dseekjax.errors import UserError
from dseekjax.files import shipped_configs
from dseekjax.section import Section
from dseekjax.yaml_file import read_yaml
from pallas_kernels import gpus

PeakDtype = Literal["float32", "tensorfloat32", "bfloat16", "float16", "float8"]


class LinkConfig(Section):
    bandwidth: float = Field(gt=0, description="Bytes per second that one GPU sends, while it receives as much.")
    latency: float = Field(ge=0, description="Seconds from one GPU to the next.")


class ClusterConfig(Section):
    """Hosts of equal GPUs, on a fast network within a host and a slower one between hosts."""

    gpu: str = Field(description="Name of the GPU, for people.")
    hosts: int = Field(1, ge=1, description="How many hosts there are, unless the command line says another number.")
    gpus_per_host: int = Field(8, ge=1, description="How many GPUs one fast network connects.")
    memory_bytes: int = Field(gt=0, description="Device memory of a GPU, as its driver reports it.")
    reserved_bytes: int = Field(
        2 * 2**30,
        ge=0,
        description="Device memory that CUDA, NCCL and libraries take; an estimate, programs have less.",
    )
    peak_flops: dict[PeakDtype, Annotated[float, Field(gt=0)]] = Field(
        min_length=1, description="Dense FLOP/s of a GPU by dtype."
    )
    within_host: LinkConfig = Field(description="NVLink.")
    between_hosts: LinkConfig = Field(description="InfiniBand, or what is there instead.")
    dollars_per_gpu_hour: float | None = Field(
        None, ge=0, description="What a GPU costs; an assumption until you put yours."
    )
    target: str = Field(
        description="XLA's description of the GPU: one that is shipped (h100_sxm), or a path ending in .txtpb, beside "
        "the cluster's file."
    )


def load_cluster(name: str) -> ClusterConfig:
    """A shipped cluster by name, or one's own by the path of its YAML file; its `target` is then the path of a file.

    Raises:
        UserError: there is no such cluster, or something in its file is wrong.
    """
    folder = shipped_configs() / "clusters"
    path = Path(name) if "/" in name or name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if path.parent == folder and not path.is_file():
        known = ", ".join(cluster_names())
        raise UserError(f"--cluster: there is no cluster {name}; there are {known}, or give the path of a YAML file")
    values = read_yaml(path, "--cluster")
    try:
        cluster = ClusterConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(explain(error, values, ClusterConfig))
        raise UserError(f"--cluster: {path}: {problems}") from error
    target = cluster.target
    target_path = path.parent / target if target.endswith(".txtpb") else gpus.target_path(target)
    if not target_path.is_file():
        known = ", ".join(gpus.gpu_names())
        raise UserError(f"--cluster: {path}: target {target}: there is no {target_path}; shipped are {known}")
    return cluster.model_copy(update={"target": str(target_path)})


def cluster_names() -> list[str]:
    """What is shipped."""
    return sorted(file.stem for file in (shipped_configs() / "clusters").glob("*.yaml"))
