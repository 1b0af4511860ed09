"""What is shown while training."""

from pydantic import Field

from dseekjax.section import Section


class InsightConfig(Section):
    print_every_steps: int = Field(10, gt=0, description="Steps between printed lines.")
    tensorboard: bool = Field(True, description="Whether to write TensorBoard events to run.dir/tensorboard.")
