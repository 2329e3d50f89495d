"""What a finished training run says of itself: `run.json`, beside its drafter and its metrics."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from sglang_dflash import validation
from sglang_dflash.train.settings import Settings

FILE = "run.json"
Text = Annotated[str, Field(min_length=1)]


class Record(BaseModel):
    """A strict, frozen record: unknown keys, empty texts and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_strip_whitespace=True)


class DataCount(Record):
    """The examples of one family and split that the run was given."""

    family: Text
    split: Literal["train", "heldout"]
    examples: PositiveInt
    tokens: PositiveInt  # of the answers


class RunRecord(Record):
    """A training run that came to its end."""

    settings: Settings
    hardware: Text  # the device's name, such as "NVIDIA H100 80GB HBM3"
    minutes: PositiveFloat  # of training, over every resumption
    versions: Annotated[dict[Text, Text], Field(min_length=1)]  # by package
    command: Text
    data: Annotated[list[DataCount], Field(min_length=1)]
    sequences_per_step: PositiveInt
    blocks_per_sequence: PositiveInt
    optimizer: Text
    schedule: Text  # of the learning rate
    loss: Text
    seeds: Annotated[dict[Text, int], Field(min_length=1)]  # by what they seed

    def write(self, path: str | Path) -> Path:
        """Write the record as JSON and return the file. It appears whole or not at all."""
        file = Path(path)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return scratch.replace(file)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The record of a file that `write` made.

        Raises:
            ValueError: there is no such file, or a key is missing, unknown or wrong; every one is named.
        """
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"expected the record of a finished training run at {file}, got none; train to the end")
        try:
            return cls.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{file}:\n  - " + "\n  - ".join(validation.problems(error))) from None
