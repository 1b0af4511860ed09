"""The base of every config model: each room defines its own sections next to the code that they configure."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the config that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)
