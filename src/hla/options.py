"""The keywords that all operators share, in one place: names, defaults, meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from hla.arrays import Array


class _Shared(TypedDict, total=False):
    decay: float | Array | None
    log_decay: Array | None
    scale: float | Array
    normalize: bool
    eps: float
    ridge: float
    mask: str
    definition: str
    token_mask: Array | None
    backend: str | Sequence[str] | None


class Keywords(_Shared, total=False):
    """The keywords of `Options` for type checkers (PEP 692); a test keeps the two lists equal."""

    segment_ids: Array | None
    cu_seqlens: Array | None
    initial_state: Any
    return_state: bool
    axis: int
    form: str
    chunk_size: int | None


class StepKeywords(_Shared, total=False):
    """Keywords of `hla.step`: those of the operators that make sense for one token, and its own."""

    order: int | None
    inplace: bool


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say about how an operator is computed; the defaults are those of every form and backend."""

    decay: Any = None
    log_decay: Any = None
    scale: Any = 1.0
    normalize: bool = False
    eps: float = 1e-6
    ridge: float = 0.0
    mask: str = "causal"
    definition: str = "exact"
    token_mask: Any = None
    segment_ids: Any = None
    cu_seqlens: Any = None
    initial_state: Any = None
    return_state: bool = False
    axis: int = -2
    form: str = "auto"
    chunk_size: int | None = None
    backend: Any = None


NAMES = frozenset(f.name for f in fields(Options))
FORMS = ("auto", "recurrent", "scan", "chunkwise", "parallel")


def read_options(function: str, given: dict[str, Any]) -> Options:
    """`given` as Options; an unknown keyword is a TypeError that names the closest known one."""
    if not given.keys() <= NAMES:
        raise unknown_keyword(function, next(iter(given.keys() - NAMES)), sorted(NAMES))
    return Options(**given)


def unknown_keyword(function: str, name: str, known: Sequence[str]) -> TypeError:
    """The error for a keyword that `function` does not have."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}")


F = TypeVar("F", bound=Callable[..., Any])


def with_signature(function: F) -> F:
    """Give a function that takes **options the full signature, for help() and editors."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields(Options)]
    function.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return function
