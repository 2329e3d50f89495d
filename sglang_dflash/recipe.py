"""Recipes: one launch of a server, measured on one kind of hardware, in one YAML file.

A recipe is also a config file of SGLang's own (`--config FILE`): its keys are flags of `sglang.launch_server`. SGLang
makes a flag of every key and refuses those it does not know, with one exception that a recipe uses: `config` is a flag
itself, and when SGLang meets it inside a file nothing reads it any more. So the recipe's record (hardware, environment,
measurement) stands under `config`, and one file serves both. The environment reaches a server only through
`sglang-dflash serve --recipe`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_dflash import validation

Hardware = Literal["cpu", "h100", "h200"]
HARDWARE: tuple[str, ...] = get_args(Hardware)

_PACKAGE_DIR = Path(__file__).resolve().parent
# Beside the package's modules in a wheel, beside the package in a checkout (an editable install is a checkout).
_RECIPE_DIRS = (_PACKAGE_DIR / "recipes", _PACKAGE_DIR.parent / "recipes")

_Text = Annotated[str, Field(min_length=1)]
_PositiveInt = Annotated[int, Field(gt=0)]


def _ascending(sizes: list[int]) -> list[int]:
    if sizes != sorted(set(sizes)):
        raise ValueError(f"expected batch sizes that rise, got {sizes}")
    return sizes


class _Strict(BaseModel):
    # Strict types: YAML's own reading of `yes`, `1e3` or a bare date must not be bent into what a flag expects.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Figure(_Strict):
    """One measured number, its unit in words (`tokens/s`, `ms/step`)."""

    name: _Text
    value: float
    unit: _Text


class Measured(_Strict):
    """Where the figures come from: enough to run the measurement again."""

    card: _Text
    versions: Annotated[dict[str, str], Field(min_length=1)]
    command: _Text
    figures: Annotated[list[Figure], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_the_engine(self) -> Self:
        missing = [name for name in ("sglang", "sglang-dflash", "torch") if name not in self.versions]
        if missing:
            raise ValueError(f"expected versions of sglang, sglang-dflash and torch, got none of {', '.join(missing)}")
        return self


class Record(_Strict):
    """What SGLang does not read: the key `config` of a recipe."""

    hardware: Hardware
    # hub: model-path and speculative-draft-model-path are names on the Hugging Face hub.
    # demo: they are folders under the directory of the demo's models, which `serve` prepares.
    models: Literal["hub", "demo"]
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str]
    measured: Measured | None = None
    unmeasured: _Text | None = None

    @model_validator(mode="after")
    def _measured_or_says_why_not(self) -> Self:
        if (self.measured is None) == (self.unmeasured is None):
            got = "neither" if self.measured is None else "both"
            raise ValueError(f"expected either `measured` or `unmeasured: <reason>`, got {got}")
        if self.environment.get("SGLANG_DFLASH_STRICT") != "1":
            raise ValueError('expected SGLANG_DFLASH_STRICT: "1" in `environment`, got another value or none')
        return self


class Recipe(BaseModel):
    """A recipe file. Fields are flags of `sglang.launch_server` 0.5.23, spelled with dashes in the file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        protected_namespaces=(),
    )

    model_path: _Text
    speculative_algorithm: Literal["DFLASH"]
    speculative_draft_model_path: _Text
    speculative_num_draft_tokens: _PositiveInt
    dtype: Literal["float32", "float16", "bfloat16"]
    tp_size: _PositiveInt
    page_size: _PositiveInt
    attention_backend: _Text
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)]
    max_running_requests: _PositiveInt
    chunked_prefill_size: _PositiveInt

    device: Literal["cpu", "cuda"] | None = None
    sampling_backend: _Text | None = None
    speculative_draft_attention_backend: _Text | None = None
    speculative_draft_model_quantization: Literal["fp8"] | None = None
    cuda_graph_backend_decode: Literal["full", "disabled"] | None = None
    cuda_graph_backend_prefill: Literal["full", "breakable", "disabled"] | None = None
    cuda_graph_bs_decode: Annotated[list[_PositiveInt], Field(min_length=1), AfterValidator(_ascending)] | None = None

    config: Record

    @model_validator(mode="after")
    def _flags_suit_the_hardware(self) -> Self:
        if (self.config.hardware == "cpu") != (self.device == "cpu"):
            raise ValueError(
                f"expected `device: cpu` on hardware cpu and only there, "
                f"got device {self.device} on hardware {self.config.hardware}"
            )
        return self


def recipes_dir() -> Path:
    """The folder of the shipped recipes: `<hardware>/<target>.yaml`."""
    for path in _RECIPE_DIRS:
        if path.is_dir():
            return path
    raise FileNotFoundError(f"expected the recipes in {' or '.join(map(str, _RECIPE_DIRS))}; reinstall")


def names() -> list[str]:
    """Names of the shipped recipes, `h200/qwen3-8b`."""
    root = recipes_dir()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.yaml"))


def find(name_or_file: str) -> Path:
    """The file of a shipped recipe's name, or the file itself. A name without `.yaml` is always a shipped recipe."""
    is_file_name = name_or_file.endswith((".yaml", ".yml"))
    path = Path(name_or_file) if is_file_name else recipes_dir() / f"{name_or_file}.yaml"
    if not path.is_file():
        raise ValueError(f"expected a recipe's name or file, got {name_or_file!r}; shipped are {', '.join(names())}")
    return path.resolve()


def load(path: Path) -> Recipe:
    """Read and check one recipe. Raises ValueError naming file, key, what was expected and what was found."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, got {type(content).__name__}")
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in validation.problems(error))) from error
    folder = path.resolve().parent.name
    if folder in HARDWARE and folder != recipe.config.hardware:
        raise ValueError(f"{path}: config.hardware: expected {folder!r}, the folder, got {recipe.config.hardware!r}")
    return recipe
