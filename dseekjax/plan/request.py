"""What is asked of the process that compiles."""

from pathlib import Path

from pydantic import Field

from dseekjax.config import Config
from dseekjax.plan.cluster import ClusterConfig
from dseekjax.section import Section


class Request(Section):
    program: str = Field(description="Name of the recipe or config file, for the report.")
    config: Config
    cluster_name: str = Field(description="Name or path of the cluster, for the report.")
    cluster: ClusterConfig
    hosts: int = Field(ge=1, description="How many hosts of it.")
    hlo: Path | None = Field(None, description="Where to keep the HLO text.")
