"""Checks that an engine's classes have the methods and signatures that a plug-in was written for.

A plug-in stands on classes that the engine does not promise to keep. A method that moved or changed its arguments must
be noticed when the engine starts, with a text that says what was found and what was expected, and not by wrong rows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class EngineMismatch(RuntimeError):
    """The engine is another one than the plug-in knows. The text names both."""


@dataclass(frozen=True, slots=True)
class ClassShape:
    """What must be there.

    module: dotted name. name: of a class, or "" for the module itself.
    functions: name -> the parameters' names in order, `self` included. constants: names that only need to exist.
    """

    module: str
    name: str = ""
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: tuple[str, ...] = ()


def check_shapes(engine: str, version: str, known_versions: str, shapes: Sequence[ClassShape]) -> None:
    """Raises EngineMismatch where any shape is missing or different.

    engine, version: what runs. known_versions: what the plug-in was written for, as a text. Imports the
    shapes' modules.
    """
    problems = [problem for shape in shapes for problem in _problems(shape)]
    if problems:
        raise EngineMismatch(
            f"the engramd plug-in knows {engine} {known_versions}, but this {engine} {version} differs: "
            f"{'; '.join(problems)}. Install an engramd client for this {engine}, or a {engine} that it knows, or "
            "unset ENGRAMD_SOCKET to let the engine load its own tables"
        )


def _problems(shape: ClassShape) -> Iterator[str]:
    try:
        owner: Any = importlib.import_module(shape.module)
    except ImportError as error:
        yield f"module {shape.module} cannot be imported ({error})"
        return
    label = shape.module
    if shape.name:
        label = f"{shape.module}.{shape.name}"
        owner = getattr(owner, shape.name, None)
        if not inspect.isclass(owner):
            yield f"there is no class {label}"
            return
    for name in shape.constants:
        if not hasattr(owner, name):
            yield f"{label} has no {name}"
    for name, expected in shape.functions.items():
        # Of its own: an inherited method of that name is not the one that the plug-in wraps.
        function = getattr(owner, name) if name in vars(owner) else None
        if function is None:
            yield f"{label} has no {name}()"
            continue
        found = _parameters(function)
        if found != expected:
            yield f"{label}.{name} takes ({', '.join(found)}), not ({', '.join(expected)})"


def _parameters(function: Any) -> tuple[str, ...]:
    # A just-in-time compiled function (Triton's) keeps the Python function that it was made from.
    function = getattr(function, "fn", function)
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ("?",)
