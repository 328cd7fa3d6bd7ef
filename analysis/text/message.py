"""Texts that keep what they were made of, so that what was found in English can be said in another language.

A finding is made long before anybody knows who reads it. So whatever a reader sees is a `Text`: in English a `str` like
any other, and `spoken` puts it into the language that is being spoken. The English template is its key in the catalogue
(`report/zh.py`), as a msgid is for gettext. That module itself would add files to be compiled and plural rules, and not
what is needed here: to choose the language after the sentence was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any, TypeVar

__all__ = ["LANGUAGES", "Text", "joined", "language", "speak", "speaking", "spoken", "text", "translated"]

LANGUAGES = {"en": "en", "zh": "zh-CN"}  # as asked for -> as HTML names it
_SEPARATORS = {", ": "{one}, {other}", "; ": "{one}; {other}", " ": "{one} {other}", "": "{one}{other}"}
_language: ContextVar[str] = ContextVar("language", default="en")
_Said = TypeVar("_Said")


class Text(str):
    """A template with values put in. Values may be texts themselves."""

    __slots__ = ("template", "values")

    template: str
    values: Mapping[str, object]

    def __new__(cls, template: str, values: Mapping[str, object]) -> Text:
        made = super().__new__(cls, template.format_map(values) if values else template)
        made.template, made.values = template, values
        return made

    def __reduce__(self) -> tuple[type[Text], tuple[str, Mapping[str, object]]]:
        return Text, (self.template, self.values)

    def __add__(self, other: str) -> Text:
        return Text(_SEPARATORS[""], {"one": self, "other": other})

    def __radd__(self, other: str) -> Text:
        return Text(_SEPARATORS[""], {"one": other, "other": self})


def text(template: str, /, **values: object) -> Text:
    """`text("rank {rank} is late", rank=2)`. The template is always written out, so that translations can be checked.

    Values called `en_…` are English grammar, such as the s of a plural, and are left out elsewhere.
    """
    return Text(template, values)


def joined(separator: str, texts: Iterable[str]) -> str:
    """What `separator.join(texts)` gives, as a text; the separator is one of those that languages have their own of."""
    template, pieces = _SEPARATORS[separator], list(texts)
    return reduce(lambda one, other: Text(template, {"one": one, "other": other}), pieces) if pieces else ""


def speak(language: str) -> None:
    """From here on, in this thread."""
    _language.set(language)


@contextmanager
def speaking(language: str) -> Iterator[None]:
    before = _language.set(language)
    try:
        yield
    finally:
        _language.reset(before)


def language() -> str:
    """The language that is spoken, one of LANGUAGES."""
    return _language.get()


def spoken(said: _Said) -> _Said:
    """The value with all texts in it in the language that is spoken: a text, or what holds some, such as a report."""
    if language() == "en":
        return said
    from rankscope.analysis.text.chinese import CHINESE

    put: _Said = _translated(said, CHINESE)
    return put


def translated(template: str) -> str:
    """The template in the language that is spoken; as it is where the catalogue lacks it."""
    return spoken(Text(template, {}))


def _translated(said: Any, catalogue: Mapping[str, str]) -> Any:  # noqa: ANN401 - whatever was given
    if isinstance(said, Text):
        template = catalogue.get(said.template, said.template)
        values = {name: _translated(value, catalogue) for name, value in said.values.items()}
        return template.format_map(values) if values else template
    if isinstance(said, (tuple, list)):
        if not said or isinstance(said[0], int):  # lengths of steps, which may be millions
            return said
        return type(said)(_translated(one, catalogue) for one in said)
    if isinstance(said, dict):
        return {name: _translated(value, catalogue) for name, value in said.items()}
    if is_dataclass(said) and not isinstance(said, type):
        held = {field.name: getattr(said, field.name) for field in fields(said)}
        changed = {name: new for name, old in held.items() if (new := _translated(old, catalogue)) is not old}
        return replace(said, **changed) if changed else said
    return said
