"""The base of every config model: each room defines its own sections next to the code that they configure."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator


class Section(BaseModel):
    """A frozen part of the config that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _true_is_no_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        result = validate(value)
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError(f"is {str(value).lower()}; give what it is to be")
        return result
