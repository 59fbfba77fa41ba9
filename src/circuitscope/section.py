"""What every part of a config is: frozen, no unknown keys, no booleans or infinities where numbers go."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """Base of the config's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a name, not a boolean")
        return value
