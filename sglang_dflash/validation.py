"""What pydantic found wrong, in this package's words."""

from __future__ import annotations

from pydantic import ValidationError


def problems(error: ValidationError) -> list[str]:
    """A line for every problem: the key, what it expected, what it got and what to do."""
    lines = []
    for detail in error.errors():
        key = ".".join(map(str, detail["loc"])) or "the file"
        match detail["type"]:
            case "missing":
                lines.append(f"{key}: expected a value, got none; add it")
            case "extra_forbidden":
                lines.append(f"{key}: expected a known key, got an unknown one; remove it or correct its spelling")
            case "json_invalid":
                lines.append(f"{key}: expected JSON, got {detail['ctx']['error']}; make it anew")
            case "value_error":
                lines.append(f"{key}: {detail['ctx']['error']}")
            case _:
                expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value should have ")
                lines.append(f"{key}: expected {expected}, got {detail['input']!r}; correct it")
    return lines
