"""When checkpoints are written and which are kept."""

from pydantic import Field

from dseekjax.section import Section


class CheckpointConfig(Section):
    every_steps: int = Field(1000, gt=0, description="Steps between checkpoints; the last step is always saved.")
    keep_last: int = Field(2, gt=0, description="Newest checkpoints to keep; older ones are deleted.")
    keep_every: int | None = Field(None, gt=0, description="Keep checkpoints at multiples of this step for good.")
