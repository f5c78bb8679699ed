"""How tyro shows our option dataclasses: text wrapped to the terminal's width, some options hidden."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

#: Placeholders of numbers whose option declares none; tyro's own are INT and FLOAT.
_METAVARS = {int: "N", float: "X"}
_NUMBERS = {int: "a whole number", float: "a number"}
#: Start of a line that explains one value: "ctc: ...", "tacotron-small, tacotron (as published): ...".
_ITEM = re.compile(r"(?:\S+ ){0,5}\S+: ")


def option_rules(hidden: Collection[str] = ()) -> ConstructorRegistry:
    """Return the rules by which tyro reads a dataclass of options: a field's docstring is its help.

    Args:
        hidden: fields at any depth that are not options of this command; they keep their defaults.
    """
    registry = ConstructorRegistry()

    @registry.struct_rule
    def options_of(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type):
            return None
        fields = tuple(_specs(info.type, info.default, hidden))
        return StructConstructorSpec(instantiate=info.type, fields=fields)

    @registry.primitive_rule
    def number_of(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        is_union = info.type_origin in (typing.Union, types.UnionType)
        kinds = set(typing.get_args(info.type)) if is_union else {info.type}
        kind = next((kind for kind in _NUMBERS if kinds - {type(None)} == {kind}), None)
        return None if kind is None else _number_spec(kind, may_be_none=type(None) in kinds)

    return registry


def _specs(kind: type, default: Any, hidden: Collection[str]) -> Iterator[StructFieldSpec]:
    """Yield the options of a dataclass, those of its base classes first."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        yield StructFieldSpec(
            name=field.name,
            type=_shown(hints[field.name], is_hidden=field.name in hidden),
            default=_default(field, kind, default),
            helptext=functools.partial(_help_of, kind, field.name),
        )


def _number_spec(kind: type, *, may_be_none: bool) -> PrimitiveConstructorSpec[Any]:
    """Return the parser of a number; its messages use plain words instead of Python's types."""

    def read(words: list[str]) -> Any:
        (word,) = words
        if may_be_none and word == "None":
            return None
        try:
            return kind(word)
        except ValueError as error:
            raise ValueError(f"expected {_NUMBERS[kind]}, got {word!r}") from error

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=_METAVARS[kind],
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, (int, kind)) or (may_be_none and value is None),
        str_from_instance=lambda value: [str(value)],
    )


def _shown(hint: Any, *, is_hidden: bool) -> Any:
    """Return the type of an option, annotated for tyro."""
    if is_hidden:
        return Annotated[hint, tyro.conf.Suppress]
    return Annotated[hint, tyro.conf.arg(metavar=_METAVARS[hint])] if hint in _METAVARS else hint


def _default(field: dataclasses.Field[Any], kind: type, whole: Any) -> Any:
    if isinstance(whole, kind):
        return getattr(whole, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING_NONPROP


def _help_of(kind: type, name: str) -> str | None:
    """Return the docstring under a field, reflowed; None: it has none."""
    for owner in kind.__mro__:
        if dataclasses.is_dataclass(owner) and name in _field_docstrings(owner):
            return reflowed(_field_docstrings(owner)[name])
    return None


@functools.cache
def _field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class, by the field's name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
            found[field.target.id] = str(text.value.value)
    return found


def reflowed(text: str) -> str:
    """Join the lines of a paragraph; items of a list, and the text after a list, start on a new line.

    Example::

        reflowed("What is read.\\n  all: the whole\\n  file.\\n  Else nothing.")
        # "What is read.\\nall: the whole file.\\nElse nothing."
    """
    lines: list[str] = []
    for line in inspect.cleandoc(text).split("\n"):
        is_new = bool(lines) and lines[-1].endswith(".") and (_is_item(line) or _is_item(lines[-1]))
        if is_new or not lines:
            lines.append(line)
        else:
            lines[-1] += " " + line
    return re.sub(" +", " ", "\n".join(lines))  # two blanks would begin a line with one


def _is_item(line: str) -> bool:
    return _ITEM.match(line) is not None


@contextmanager
def wrapped_paragraphs() -> Iterator[None]:
    """Wrap long lines outside boxes that the block prints; tyro does not wrap descriptions."""
    with redirect_stdout(_Wrapping(sys.stdout)):
        yield


class _Wrapping:
    """Standard output whose long lines outside boxes are wrapped."""

    def __init__(self, stream: typing.TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        width = shutil.get_terminal_size().columns
        for line in text.splitlines(keepends=True):
            plain = line.rstrip("\n")
            if len(plain) > width and plain[0].isalpha():
                wrapped = textwrap.wrap(plain, width, break_long_words=False, break_on_hyphens=False)
                self._stream.write("\n".join(wrapped) + line[len(plain) :])
            else:
                self._stream.write(line)
        return len(text)
