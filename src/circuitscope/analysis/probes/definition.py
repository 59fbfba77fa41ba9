"""Probe definitions: small YAML files that say what to decode, where, from which hooks and how.

Definitions that come with the package have names that work in any folder. They are in the installed package, or in
`probes/` of the repository from which it is installed.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from circuitscope.analysis.probes.fitting import MODELS
from circuitscope.analysis.probes.targets import CANDIDATES, TARGETS
from circuitscope.config import read_yaml
from circuitscope.errors import UserError, unknown
from circuitscope.explain import explain
from circuitscope.section import Section
from circuitscope.tasks import Role

_FOLDERS = (Path(__file__).with_name("definitions"), Path(__file__).parents[4] / "probes")


class Definition(Section):
    """What a probe file holds; probes/README.md explains each field."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name of the probe; the file's name by default"
    )
    about: str = Field(default="", description="one sentence for the list of probes")
    target: str = Field(description="what to decode")
    roles: tuple[str, ...] | Literal["each"] = Field(
        description="roles of the positions, or each: every role that has the target"
    )
    at: Literal["own", "before", "context-end"] = Field(
        default="own",
        description="where the activation is read: at the position itself, one before it,"
        " or at the last position of the context",
    )
    hooks: tuple[str, ...] = Field(
        default=("blocks.*.hook_resid_post",), min_length=1, description="hook names; * stands for any part of a name"
    )
    model: str = Field(description="logistic, ridge, embedding or candidates")
    candidates: str | None = Field(
        default=None, description="for token targets, where to choose from: context, sequence or vocabulary"
    )
    control: Literal["shuffled", "none"] = Field(default="shuffled", description="the control task")
    read_out: bool = Field(default=False, description="read a state by the mixer's own C or q at the position")
    per_sequence: int = Field(default=8, ge=1, description="positions of a role per sequence, at most")

    @field_validator("roles", "hooks", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and value != "each" else value

    @model_validator(mode="after")
    def _names_exist(self) -> "Definition":
        target = TARGETS[self.target]
        if self.model not in MODELS:
            raise unknown("model", self.model, MODELS)
        if self.model not in target.models:
            raise UserError(
                f"target {self.target} is a {target.kind}, which the model '{self.model}' does not decode;"
                f" expected {' or '.join(target.models)}"
            )
        if self.candidates is not None and self.candidates not in CANDIDATES:
            raise unknown("candidate set", self.candidates, CANDIDATES)
        if self.candidates is not None and self.model not in ("embedding", "candidates"):
            raise UserError(f"candidates are for the models embedding and candidates, not for {self.model}")
        for role in self.roles if self.roles != "each" else ():
            if role.lower() not in (names := [r.name for r in Role]):
                raise unknown("role", role, [*names, "each"])
        if not self.roles:
            raise UserError("a probe needs at least one role, or roles: each")
        return self

    @staticmethod
    def parse(data: Any, name: str = "probe", source: str = "") -> "Definition":
        """A definition from plain data; an error is one line that says what is wrong."""
        before = f"{source}: " if source else ""
        if not isinstance(data, dict):
            raise UserError(f"{before}a probe is a mapping with target, roles and model, got {type(data).__name__}")
        try:
            return Definition.model_validate({"name": name, **data})
        except ValidationError as error:
            raise UserError(f"{before}{explain(error, Definition)}") from None
        except UserError as error:
            raise UserError(f"{before}{error}") from None

    @staticmethod
    def load(name: "str | Path | Definition") -> "Definition":
        """A definition by name, or from a file."""
        if isinstance(name, Definition):
            return name
        path = Path(name)
        if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
            if not path.is_file():
                raise UserError(f"there is no probe file {path}; probes by name: {', '.join(shipped())}")
            return Definition.parse(read_yaml(path), path.stem, str(path))
        known = shipped()
        if str(name) not in known:
            raise unknown("probe", str(name), known)
        return Definition.parse(read_yaml(known[str(name)]), str(name), str(known[str(name)]))


def shipped() -> dict[str, Path]:
    """The definitions that come with the package, by name."""
    folder = next((f for f in _FOLDERS if f.is_dir()), None)
    if folder is None:
        raise UserError("the package has no folder of probe definitions; install it again, or give a file")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
