"""Turn what a file or a command line holds into the type that a field asks for. Strict: what is no number is refused.

Pure functions on one value; which fields exist is not known here. Understood as numbers: 1e-6 (PyYAML alone reads it
as text), "1_000", and "10%" where the field is a ratio. nan and inf are refused.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
DECIMAL = re.compile(r"[+-]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
TRUE_WORDS = ("true", "yes", "on")
FALSE_WORDS = ("false", "no", "off")
NULL_WORDS = ("null", "~", "none")


@dataclass(frozen=True)
class Refused:
    """The value does not fit. Returned, not raised: the caller collects all of them."""

    rule: str
    fix: str


def cast(value: Any, kind: Any, *, ratio: bool = False) -> Any:
    """The value as `kind` (an annotation), or Refused.

    Of a union the first member that takes the value wins; text arms come last so that "8" becomes 8.
    """
    arms = members(kind)
    values = [arm for arm in arms if arm is not type(None)]
    if value is None or (isinstance(value, str) and type(None) in arms and value.strip().lower() in NULL_WORDS):
        return (
            None
            if type(None) in arms
            else Refused(f"must be {describe(kind)}, not empty", "write a value or leave it out")
        )
    for arm in sorted(values, key=lambda arm: arm is str):
        result = cast_one(value, arm, ratio)
        if not isinstance(result, Refused):
            return result
    if len(values) == 1:
        return cast_one(value, values[0], ratio)
    return Refused(f"must be {describe(kind)}", hint_for(value, kind))


def members(kind: Any) -> tuple[Any, ...]:
    """The arms of a union, nested ones too; a plain type is its own only arm."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(arm for part in get_args(kind) for arm in members(part))
    return (kind,)


def cast_one(value: Any, arm: Any, ratio: bool) -> Any:
    """As `cast`, for one arm."""
    if get_origin(arm) is Literal:
        return cast_literal(value, get_args(arm))
    if get_origin(arm) is list:
        return cast_list(value)
    if get_origin(arm) is dict:
        return cast_mapping(value)
    if arm is float:
        return cast_float(value, ratio)
    return CASTERS[arm](value)


def cast_bool(value: Any) -> Any:
    """true and false; as text also yes, no, on, off."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    return Refused("must be true or false", "write true or false")


def cast_int(value: Any) -> Any:
    """A whole number; 8.0 and 1e3 are whole, 8.5 and true are not."""
    number = value
    if isinstance(value, str) and INTEGER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, str):
        number = cast_float(value, ratio=False)
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        return int(number)
    return Refused("must be a whole number", number_hint(value, whole=True))


def cast_float(value: Any, ratio: bool) -> Any:
    """A finite number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (
            finite(float(value))
            if abs(value) < 1e308 or isinstance(value, float)
            else Refused("must be a number", "it is too large")
        )
    text = value.strip() if isinstance(value, str) else ""
    if ratio and text.endswith("%") and DECIMAL.fullmatch(text[:-1].strip()):
        return finite(float(text[:-1]) / 100)
    if DECIMAL.fullmatch(text):
        return finite(float(text))
    return Refused("must be a number", number_hint(value, whole=False))


def finite(number: float) -> Any:
    """The number unless it is nan or infinite."""
    return number if math.isfinite(number) else Refused("must be finite, not nan or inf", "write a plain number")


def cast_str(value: Any) -> Any:
    """Text. Numbers are taken as they are written; true, lists and mappings are not."""
    if isinstance(value, str):
        return value if value.strip() else Refused("must not be empty", "write a value or leave the key out")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return Refused("must be text", "write it in quotes")


def cast_literal(value: Any, choices: tuple[Any, ...]) -> Any:
    """One of the choices; case and outer blanks do not matter, a near miss is named."""
    word = value.strip().lower() if isinstance(value, str) else value
    if isinstance(word, str) and word in choices:
        return word
    return Refused(f"must be {listing(choices)}", nearest_fix(value, choices))


def cast_list(value: Any) -> Any:
    """A list of texts, none empty."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v.strip() for v in value):
        return list(value)
    return Refused("must be a list of texts", "write [first, second]")


def cast_mapping(value: Any) -> Any:
    """Text to text."""
    if isinstance(value, dict) and all(isinstance(x, str) and x.strip() for pair in value.items() for x in pair):
        return dict(value)
    return Refused("must be a mapping of text to text", "write {prompt: question}")


CASTERS: dict[Any, Callable[[Any], Any]] = {bool: cast_bool, int: cast_int, str: cast_str}


def describe(kind: Any) -> str:
    """A type in words: `auto`, or a whole number."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    parts: list[str] = []
    for arm in members(kind):
        if get_origin(arm) is Literal:
            parts.extend(str(choice) for choice in get_args(arm))
        elif get_origin(arm) is list:
            parts.append("a list")
        elif get_origin(arm) is dict:
            parts.append("a mapping")
        else:
            parts.append(words[arm])
    return listing(parts)


def hint_for(value: Any, kind: Any) -> str:
    """The way out for a value that fits no arm of a union."""
    choices = [choice for arm in members(kind) if get_origin(arm) is Literal for choice in get_args(arm)]
    near = nearest(value, choices)
    return f"write {near or describe(kind)}"


def listing(items: Any) -> str:
    """a, b or c."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def nearest_fix(value: Any, choices: Any) -> str:
    """Name the choice that was probably meant."""
    return f"write {nearest(value, choices) or listing(choices)}"


OTHER_WORDS = {"gpu": "cuda", "nvidia": "cuda", "half": "float16", "float": "float32", "single": "float32"}


def nearest(value: Any, choices: Any) -> str:
    """The choice that was probably meant; empty where none is near."""
    from difflib import get_close_matches  # 10 ms, only needed to report

    texts = [str(choice) for choice in choices]
    word = str(value).lower()
    if OTHER_WORDS.get(word) in texts:
        return OTHER_WORDS[word]
    return next(iter(get_close_matches(word, texts, n=1, cutoff=0.5)), "")


def number_hint(value: Any, *, whole: bool) -> str:
    """How the number would be written."""
    text = value.strip() if isinstance(value, str) else ""
    with_point = text.replace(",", ".") if re.fullmatch(r"[0-9]+,[0-9]+", text) and not whole else ""
    without = text.replace(",", "") if re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+", text) else ""
    if with_point or without:
        return f"write {' or '.join(filter(None, (with_point, without)))}"
    if isinstance(value, str) and value.strip().endswith("%"):
        return "this field is no ratio: write a plain number"
    if whole and isinstance(value, float) and math.isfinite(value):
        return f"write {round(value)}"
    return "write a whole number like 8" if whole else "write a number like 1e-6 or 0.5"
