"""Types that several sections share."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kvreturn.core.address import split_address


class Section(BaseModel):
    """A mapping of the settings file: no unknown members, and never changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _address(value: str) -> str:
    if "://" in value:
        raise ValueError(f"{value!r}: write host:port, without a scheme")
    split_address(value)
    return value


def _listen(value: str) -> str:
    return value if value.startswith("unix:/") else _address(value)


Address = Annotated[str, AfterValidator(_address), Field(examples=["10.0.0.7:8000", "[fd00::7]:8000"])]
Listen = Annotated[str, AfterValidator(_listen)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Proof = Annotated[
    Literal["connector", "router", "trusted", "off"],
    BeforeValidator(lambda value: "off" if value is False else value),  # YAML 1.1 reads a bare `off` as false
]
Return = Literal["lazy", "eager", "auto"]
