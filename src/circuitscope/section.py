"""What every part of a config is: frozen, no unknown keys, no booleans or infinities where numbers go.

A part also says which of its fields do not matter for a run's weights, and which were added later than others.
"""

from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, field_validator


class Added(NamedTuple):
    """Marks a field that is younger than configs that people have: `name: Annotated[bool, Added(2, before=False)]`.

    schema: first version of config.yaml that has the field; a file of an earlier version means `before`
    before: the value at which a run is what it was before there was such a field; it leaves the run's digest alone
    """

    schema: int
    before: Any


class Section(BaseModel):
    """Base of the config's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a name, not a boolean")
        return value

    @classmethod
    def added(cls) -> dict[str, Added]:
        """The fields that were added later."""
        marks = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark for name, mark in marks if isinstance(mark, Added)}

    def without_effect(self) -> frozenset[str]:
        """Names of the fields that, as this part is set, do not change the weights of a run."""
        return frozenset()
