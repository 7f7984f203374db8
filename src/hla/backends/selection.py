"""Which backend runs a call: argument, then context, then global setting, then environment, then automatic.

The context is a ContextVar, so that threads and asyncio tasks do not disturb each other; JAX's jit cache is told of it.
The global setting is a plain module attribute, which new threads see. The environment is read on every call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from hla import arrays
from hla.arrays import dtype_name
from hla.backends import registry as _registry
from hla.backends.registry import Backend, Call, Guests, Verdict
from hla.errors import BackendNotInstalledError, BackendUnsupportedError, OptionError, message
from hla.problem import Problem

ENVIRONMENT = "HLA_BACKEND"
Names: TypeAlias = tuple[str, ...]

_context: ContextVar[Names | None] = ContextVar("hla_backend", default=None)
_global: Names | None = None
_jax_context: Any = None


class Candidate(NamedTuple):
    """A backend's verdict on a call."""

    name: str
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What `hla.explain` answers."""

    backend: str
    """the backend that would run"""
    form: str
    """the form that would run"""
    source: str
    """who decided: "argument", "context", "global", "env" or "auto" """
    candidates: tuple[Candidate, ...]
    """every backend, best first, with its reason for or against"""

    def __str__(self) -> str:
        lines = [f"{self.backend}, form {self.form} (chosen by {self.source})"]
        lines += [f"  {'+' if c.ok else '-'} {c.name}: {c.reason}" for c in self.candidates]
        return "\n".join(lines)


def names_of(value: Any, argument: str = "backend") -> Names:
    """A selection as names: "auto" and None are the empty selection; `argument` is where it was given."""
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    if names == ("auto",):
        return ()
    if "auto" in names:
        raise OptionError(message("backend", '"auto" alone, or names', f"{names}", "Drop one or the other."))
    for name in names:
        if not isinstance(name, str) or name not in _registry.registered():
            raise _registry.unknown(name, argument)
    if not names:
        raise OptionError(
            message("backend", "a name or a list of names", "an empty list", 'Pass "auto" for automatic.')
        )
    return names


def set_backend(backend: str | Sequence[str] | None) -> None:
    """Choose the backend for the whole process; None or "auto" goes back to automatic.

    The choice is part of the key of `jax.jit`'s cache, as that of `use_backend` is: compiled functions are traced
    again. (HLA_BACKEND is not: change it before JAX compiles.)

    Args:
        backend: a name, or names in order of preference. A named backend runs or raises, it never falls back.

    Raises:
        UnknownBackendError: no backend of that name.

    Example:
        >>> import hla
        >>> hla.set_backend("numpy"); hla.get_backend()
        'numpy'
        >>> hla.set_backend(None); hla.get_backend()
        'auto'
    """
    global _global
    _global = names_of(backend) or None
    _tell_jit()


def get_backend() -> str | Names:
    """The selection in force here and now: a name, several names, or "auto"; what an argument would override.

    Example:
        See `set_backend` and `use_backend`.
    """
    names, _ = _selected(None)
    return "auto" if not names else names[0] if len(names) == 1 else names


@contextmanager
def use_backend(backend: str | Sequence[str] | None) -> Iterator[None]:
    """Choose the backend within a ``with`` block, for this thread or asyncio task only; "auto" undoes an outer choice.

    Args:
        backend: a name, or names in order of preference.

    Raises:
        UnknownBackendError: no backend of that name.

    Example:
        >>> import hla
        >>> with hla.use_backend("numpy"):
        ...     hla.get_backend()
        'numpy'
    """
    names = names_of(backend)
    token = _context.set(names)
    try:
        with ExitStack() as stack:
            jit_key = _jit_context()
            if jit_key is not None:
                stack.enter_context(jit_key(names))
            yield
    finally:
        _context.reset(token)


def _jit_context() -> Any:
    """A JAX user context: a value that is part of the key of jit's cache. None while JAX is not loaded."""
    global _jax_context
    jax = arrays.loaded("jax")
    if jax is None or not hasattr(jax, "make_user_context"):
        return None
    if _jax_context is None:  # what was traced before there was one has the key None, which is no choice
        _jax_context = jax.make_user_context(default_value=None)
        _jax_context.set_global(_global or ())
    return _jax_context


def _tell_jit() -> None:
    """Make the global choice part of jit's key."""
    jit_key = _jit_context()
    if jit_key is not None:
        jit_key.set_global(_global or ())


def snapshot() -> dict[str, Names | None]:
    """The choice made here, as something that pickles: hand it to workers, which call `restore`.

    Example:
        >>> import hla
        >>> with hla.use_backend("numpy"):
        ...     choice = hla.backends.snapshot()
        >>> choice
        {'context': ('numpy',), 'global': None}
    """
    return {"context": _context.get(), "global": _global}


def restore(choice: dict[str, Names | None]) -> None:
    """Make a `snapshot` of another thread or process the choice here.

    Example:
        >>> import hla
        >>> hla.backends.restore({"context": None, "global": None}); hla.get_backend()
        'auto'
    """
    global _global
    _global = choice["global"]
    _tell_jit()
    _context.set(choice["context"])
    jit_key = _jit_context()
    if jit_key is not None and choice["context"] is not None:
        jit_key(choice["context"]).__enter__()  # for as long as this thread lives, as the choice itself


def _selected(argument: Any) -> tuple[Names, str]:
    if argument is not None:
        names = names_of(argument)
        return names, "argument" if names else "auto"
    context = _context.get()
    if context is not None:
        return context, "context" if context else "auto"
    if _global is not None:
        return _global, "global"
    value = os.environ.get(ENVIRONMENT, "").strip()
    if value:
        names = names_of(tuple(name.strip() for name in value.split(",")), f"backend from {ENVIRONMENT}")
        return names, "env" if names else "auto"
    return (), "auto"


def in_force(argument: Any) -> tuple[Names, int]:
    """What a choice depends on beside the call: the names selected, and which backends there are."""
    return _selected(argument)[0], _registry.generation


def guests(argument: Any) -> Guests | None:
    """How the first named backend that takes objects which are no arrays does so."""
    found = (_registry.get(name) for name in _selected(argument)[0])
    return next((b.guests for b in found if b.guests is not None and b.availability().ok), None)


def available() -> list[str]:
    """Names of the backends that can run on this machine, best first.

    Example:
        >>> import hla
        >>> "numpy" in hla.backends.available()
        True
    """
    return [b.spec.name for b in _ranked() if b.availability().ok]


def _ranked() -> list[Backend]:
    return sorted(_registry.registered().values(), key=lambda b: (-b.spec.priority, b.spec.name))


def call_of(problem: Problem, form: str) -> Call:
    """What backends are shown of a problem."""
    q, k, v, spec = problem.q, problem.k, problem.v, problem.program.spec
    options = {
        name
        for name, used in (
            ("decay", problem.log_decay is not None and problem.constant),
            ("log_decay", problem.log_decay is not None and not problem.constant),
            ("token_mask", problem.token_mask is not None),
            ("segment_ids", problem.starts is not None),
            ("cu_seqlens", problem.cu_seqlens is not None),
            ("initial_state", problem.initial is not None),
            ("return_state", problem.return_state),
            ("normalize", spec.normalize),
            ("ridge", spec.ridge),
            (f"mask={spec.mask}", True),
            (f"definition={spec.definition}", True),
        )
        if used
    }
    library, where = arrays.family(v), arrays.device(v)
    grad: bool | None = False
    if library == "torch":
        inputs = (q, k, v, problem.log_decay, problem.scale, *(problem.initial or {}).values())
        grad = any(getattr(x, "requires_grad", False) for x in inputs)
    elif library == "jax":
        grad = None
    return Call(
        operator=spec.operator,
        family=library,
        dtypes=(dtype_name(q.dtype), dtype_name(k.dtype), dtype_name(v.dtype)),
        device="" if where is None else str(where),
        d=int(q.shape[-1]),
        dv=int(v.shape[-1]),
        rank=max(q.ndim, k.ndim, v.ndim),
        form=form,
        needs_grad=grad,
        traced=any(arrays.is_traced(x) for x in (q, k, v)),
        options=frozenset(options),
        order=spec.order,
    )


_choices: dict[Any, Backend] = {}


def resolve(call: Call, argument: Any, gradient: bool = False) -> Backend:
    """The backend that runs a call; the errors of the contract when the named ones cannot."""
    names, _ = _selected(argument)
    key = (call, names, gradient, _registry.generation)
    found = _choices.get(key)
    if found is None:
        if len(_choices) > 4096:
            _choices.clear()
        found = _choices[key] = _choose(call, names, gradient)
    return found


def _choose(call: Call, names: Names, gradient: bool) -> Backend:
    if not names:
        for backend in _ranked():
            if backend.verdict(call, gradient, named=False).ok:
                return backend
        raise _unsupported(call, _judge(call, gradient))
    backends = [_registry.get(name) for name in names]
    for backend in backends:
        if backend.verdict(call, gradient).ok:
            return backend
    absent = [b for b in backends if not b.installed]
    if len(absent) == len(backends):
        first = absent[0].spec
        raise BackendNotInstalledError(
            message(
                "backend",
                f"{first.name} with its packages installed ({', '.join(first.requires)})",
                "an environment without them",
                f"Run: {first.install}",
            )
        )
    raise _unsupported(call, [Candidate(b.spec.name, *b.verdict(call, gradient)) for b in backends])


def _judge(call: Call, gradient: bool, named: tuple[str, ...] = ()) -> list[Candidate]:
    return [Candidate(b.spec.name, *b.verdict(call, gradient, named=b.spec.name in named)) for b in _ranked()]


def _unsupported(call: Call, candidates: list[Candidate]) -> BackendUnsupportedError:
    reasons = "; ".join(f"{c.name}: {c.reason}" for c in candidates)
    what = f"{call.operator} on {call.family} arrays ({'/'.join(call.dtypes)}, form {call.form})"
    return BackendUnsupportedError(
        message("backend", f"one that can run {what}", reasons, 'Choose another backend or form, or backend="auto".')
    )


def explain_call(call: Call, argument: Any, form: str) -> Plan:
    """The plan of a call."""
    names, source = _selected(argument)
    backend = resolve(call, argument)
    candidates = _judge(call, False, names)
    if names:
        named = set(names)
        candidates = [
            c if c.name in named else Candidate(c.name, c.ok, c.reason + ("; not named" if c.ok else ""))
            for c in candidates
        ]
    return Plan(backend.spec.name, form, source, tuple(candidates))


__all__ = ["Candidate", "Plan", "Verdict", "available", "get_backend", "set_backend", "use_backend"]
