"""Probe definitions: small YAML files that say what to decode, where, from which hooks and how.

Definitions that come with the package have names that work in any folder. They are in the installed package, or in
`probes/` of the repository from which it is installed.
"""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from circuitscope.analysis.probes.fitting import MODELS
from circuitscope.analysis.probes.targets import CANDIDATES, TARGETS
from circuitscope.arguments import explained
from circuitscope.config import read_yaml
from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.section import Section
from circuitscope.tasks import Role

_FOLDERS = (Path(__file__).with_name("definitions"), Path(__file__).parents[4] / "probes")


_OFFSETS = {"own": 0, "before": -1, "context-end": None}


class Definition(Section):
    """What a probe file holds; probes/README.md explains each field."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", description="name of the probe; the file's name by default"
    )
    about: str = Field(default="", description="one sentence for the list of probes")
    target: str = Field(description="what to decode")
    roles: tuple[str, ...] | Literal["each"] = Field(
        description="roles of the positions, or each: every role that has the target"
    )
    at: str = Field(
        default="own",
        description="where the activation is read: own, the position itself; before, one before it; +1, one after it"
        " (+2 …); context-end, the last position of the context",
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

    @field_validator("at", mode="before")
    @classmethod
    def _number_is_an_offset(cls, value: Any) -> Any:
        """YAML reads +1 as the number 1."""
        if isinstance(value, int) and not isinstance(value, bool):
            value = {0: "own", -1: "before"}.get(value, f"{value:+d}")
        if not re.fullmatch(r"own|before|context-end|\+[1-9]\d{0,8}", str(value)):
            raise UserError(
                f"at: expected own, before, +1 (so many positions after it) or context-end, got {shown(value)}"
            )
        return value

    @property
    def offset(self) -> int | None:
        """How far from its position the activation is read; None if it is read at the end of the context."""
        return int(self.at) if self.at.startswith("+") else _OFFSETS[self.at]

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
    @explained
    def load(name: "str | Path | Definition") -> "Definition":
        """A definition by name, or from a file; "bound-key+1" is bound-key, read one position later."""
        if isinstance(name, Definition):
            return name
        path = Path(name)
        if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
            if not path.is_file():
                raise UserError(f"there is no probe file {path}; probes by name: {', '.join(shipped())}")
            return Definition.parse(read_yaml(path), path.stem, str(path))
        known = shipped()
        base, plus, offset = str(name).partition("+")
        if base not in known or (plus and not offset.isdecimal()):
            raise unknown("probe", str(name), known)
        data = read_yaml(known[base])
        if plus and "at" in data:
            raise UserError(f"the probe {base} says itself where it reads, at: {data['at']}; expected {base} without +")
        return Definition.parse({**data, **({"at": int(offset)} if plus else {})}, str(name), str(known[base]))


def shipped() -> dict[str, Path]:
    """The definitions that come with the package, by name."""
    folder = next((f for f in _FOLDERS if f.is_dir()), None)
    if folder is None:
        raise UserError("the package has no folder of probe definitions; install it again, or give a file")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
