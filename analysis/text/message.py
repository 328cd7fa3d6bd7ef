"""Texts that keep their template and values, so that English findings can be translated later.

A finding is made long before its reader's language is known. So all that a reader sees is a `Text`: in English a `str`
like any other, and `spoken` translates it. The English template is its msgid, and `<language>.po` beside this file is
the catalog, which babel reads; `tools/texts.py` keeps it in step with the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import cache, reduce
from gettext import GNUTranslations
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["LANGUAGES", "Text", "joined", "language", "plural", "speak", "speaking", "spoken", "text", "translated"]

LANGUAGES = {"en": "en", "zh": "zh-CN"}  # as asked for -> as HTML names it
_SEPARATORS = {", ": "{one}, {other}", "; ": "{one}; {other}", " ": "{one} {other}", "": "{one}{other}"}
_language: ContextVar[str] = ContextVar("language", default="en")
_Said = TypeVar("_Said")


class Text(str):
    """A template with values put in. Values may be texts themselves.

    `forms` are the templates for one and for several, and the number that chooses; None where there is only one.
    """

    __slots__ = ("forms", "template", "values")

    template: str
    values: Mapping[str, object]
    forms: tuple[str, str, int] | None

    def __new__(cls, template: str, values: Mapping[str, object], forms: tuple[str, str, int] | None = None) -> Text:
        # What is kept is read back without its class: an object is what it says of itself.
        values = {name: str(value) if is_dataclass(value) else value for name, value in values.items()}
        made = super().__new__(cls, template.format_map(values) if values else template)
        made.template, made.values, made.forms = template, values, forms
        return made

    def __reduce__(self) -> tuple[type[Text], tuple[str, Mapping[str, object], tuple[str, str, int] | None]]:
        return Text, (self.template, self.values, self.forms)

    def __add__(self, other: str) -> Text:
        return Text(_SEPARATORS[""], {"one": self, "other": other})

    def __radd__(self, other: str) -> Text:
        return Text(_SEPARATORS[""], {"one": other, "other": self})


def text(template: str, /, **values: object) -> Text:
    """`text("rank {rank} is late", rank=2)`. The template is always written out, so that catalogs can be checked."""
    return Text(template, values)


def plural(one: str, several: str, number: int, /, **values: object) -> Text:
    """`plural("{ranks} is late", "{ranks} are late", len(found), ranks=…)`: gettext's ngettext, as a text."""
    return Text(one if number == 1 else several, values, (one, several, number))


def joined(separator: str, texts: Iterable[str]) -> str:
    """Join texts into one.

    The separator is one of those that each language has its own form of.
    """
    template, pieces = _SEPARATORS[separator], list(texts)
    return reduce(lambda one, other: Text(template, {"one": one, "other": other}), pieces) if pieces else ""


def speak(language: str) -> None:
    """Set the language from here on, in this thread."""
    _language.set(language)


@contextmanager
def speaking(language: str) -> Iterator[None]:
    before = _language.set(language)
    try:
        yield
    finally:
        _language.reset(before)


def language() -> str:
    """Return the language that is spoken, one of LANGUAGES."""
    return _language.get()


def spoken(said: _Said) -> _Said:
    """Return the value with all texts in it in the language that is spoken.

    A text, or what holds some, such as a report.
    """
    if language() == "en":  # the msgids are English
        return said
    put: _Said = _translated(said, _catalog(language()))
    return put


def translated(template: str) -> str:
    """Return the template in the language that is spoken; as it is where the catalog lacks it."""
    return spoken(Text(template, {}))


@cache
def _catalog(language: str) -> GNUTranslations:
    from babel.messages.mofile import write_mo
    from babel.messages.pofile import read_po

    compiled = BytesIO()
    with Path(__file__).with_name(f"{language}.po").open("rb") as file:
        write_mo(compiled, read_po(file, locale=language))
    compiled.seek(0)
    return GNUTranslations(compiled)


def _translated(said: Any, catalog: GNUTranslations) -> Any:  # noqa: ANN401 - whatever was given
    if isinstance(said, Text):
        if not said:  # gettext keeps the catalog's header under the empty text
            return said
        template = catalog.ngettext(*said.forms) if said.forms else catalog.gettext(said.template)
        values = {name: _translated(value, catalog) for name, value in said.values.items()}
        return template.format_map(values) if values else template
    if isinstance(said, (tuple, list)):
        if not said or isinstance(said[0], int):  # lengths of steps, which may be millions
            return said
        return type(said)(_translated(one, catalog) for one in said)
    if isinstance(said, dict):
        return {name: _translated(value, catalog) for name, value in said.items()}
    if is_dataclass(said) and not isinstance(said, type):
        held = {field.name: getattr(said, field.name) for field in fields(said)}
        changed = {name: new for name, old in held.items() if (new := _translated(old, catalog)) is not old}
        return replace(said, **changed) if changed else said
    return said
