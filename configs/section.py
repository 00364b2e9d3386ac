"""Base class of every config section, and the types of their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

INT32_MAX = 2**31 - 1
"""Token ids, positions and step counters are int32 on the devices."""
PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT32_MAX)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
MeshSize = Annotated[int, Field(ge=-1, le=INT32_MAX)]
LocalPath = Annotated[Path, Field(strict=False)]
"""A path written as text, relative to the working directory."""
Name = Annotated[str, StringConstraints(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def env_allowed(**kwargs: Any) -> Any:
    """Declare a field whose YAML value may use `${env:NAME}` or `${env:NAME,default}`."""
    return Field(json_schema_extra={"env_interpolation": True}, **kwargs)


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are immutable, docstrings become field descriptions.

    Strict types: "12", 1.5 and true are not integers; an integer is accepted as a float.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True)
