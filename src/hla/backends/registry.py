"""What a backend is, and which backends there are. Choosing among them is `hla.backends.selection`."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from hla.arrays import FLOATING, Array
from hla.errors import OptionError, UnknownBackendError, message
from hla.family import OPERATORS
from hla.problem import Problem, Runner, States

ENTRY_POINTS = "hla.backends"
Gradient: TypeAlias = "Callable[[Problem, Array, States | None], Any]"


class Verdict(NamedTuple):
    """Yes or no, and why."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a backend may look at to say whether it can run a call. There are no arrays in it, and no lengths: verdicts
    are cached, for all batch shapes and all T at once."""

    operator: str
    family: str
    """library of the arrays: "numpy", "torch", "jax", "cupy", "array_api_strict", …"""
    dtypes: tuple[str, str, str]
    """of q, k, v"""
    device: str
    """as the library prints it, "" where there is none to speak of"""
    d: int
    dv: int
    rank: int
    """the largest number of axes among q, k, v"""
    form: str
    """as asked, possibly "auto" """
    needs_grad: bool | None
    """None where it cannot be known"""
    traced: bool
    """whether values are hidden by a transformation"""
    options: frozenset[str]
    """names of the options in use, e.g. {"decay", "cu_seqlens", "normalize"}; mask and definition as "mask=prefix" """
    order: int = 0
    """of "higher_order", 4 or more; 0 for the operators with a name"""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend says of itself.

    Attributes:
        name: how it is chosen.
        families: libraries whose arrays it takes, "*" for any.
        description: one line for `hla info`.
        requires: importable packages it needs.
        extra: the extra of this distribution that installs them (or a plug-in's own requirement, see `pip`).
        pip: the pip argument that installs what is missing; by default ``hla[extra]``.
        operators: operators it can run.
        forms: forms it can run.
        dtypes: dtypes it takes.
        products: by dtype of the inputs, the dtype to which operands of products are rounded, where that is not
            the dtype of accumulation: {"bfloat16": "bfloat16"}.
        gradients: whether it can differentiate, by the library's own means or for `hla.vjp`.
        priority: among backends that can run a call, the highest wins.
    """

    name: str
    families: tuple[str, ...]
    description: str = ""
    requires: tuple[str, ...] = ()
    extra: str = ""
    pip: str = ""
    operators: tuple[str, ...] = OPERATORS
    forms: tuple[str, ...] = ("chunkwise",)
    dtypes: tuple[str, ...] = FLOATING
    products: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    gradients: bool = True
    priority: int = 0

    @property
    def install(self) -> str:
        """The command that installs what the backend needs."""
        wanted = [self.pip] if self.pip else [f"hla[{self.extra}]"] if self.extra else self.requires
        return " ".join(["pip install", *(f'"{name}"' for name in wanted)])


class Guests(NamedTuple):
    """How a backend takes objects that are no arrays of any known library, where it is named: without copies."""

    take: Callable[[Any], Any]
    """from such an object to an array of the backend; anything else stays as it is"""
    back: Callable[[Any], Callable[[Array], Any]]
    """from the caller's v to a function of the output"""


def _yes_probe() -> Verdict:
    return Verdict(True, "available")


def _yes_supports(call: Call) -> Verdict:
    return Verdict(True, "supported")


def _form_as_asked(problem: Problem) -> str:
    return "chunkwise" if problem.form == "auto" else problem.form


@dataclass(frozen=True, eq=False)
class Backend:
    """A backend: its spec and the functions that do the work.

    Attributes:
        spec: what it says of itself.
        load: operator → a function that runs a `Problem` and returns (output (*batch, T, dv), final states by
            symbol). Called once per operator; a framework is imported here, not before.
        load_gradient: operator → a function (problem, d_output, d_final) → `hla.gradients.ProblemGradients`, for
            `hla.vjp`; None when the backend has none of its own.
        probe: whether it can work on this machine (may import); asked until the first yes, after `requires` were found.
        supports: whether it can run a call, beyond what the spec says. Exceptions in it are not caught.
        offers: whether the automatic choice may take it for a call that it supports; a named backend is not asked.
        check: a test of itself on this machine, for `hla info`; None when there is none.
        plain_form: the form that "auto" stands for on a problem.
        step_namespaces: where decode steps need no more than the core's own operations, a function that gives the
            namespaces they run in, (one that keeps its operands, one that may overwrite them); such steps skip `load`.
        guests: how it takes objects that are no arrays, such as Numba's device arrays; None where it does not.
    """

    spec: BackendSpec
    load: Callable[[str], Runner]
    load_gradient: Callable[[str], Gradient] | None = None
    probe: Callable[[], Verdict] = _yes_probe
    supports: Callable[[Call], Verdict] = _yes_supports
    offers: Callable[[Call], Verdict] = _yes_supports
    check: Callable[[], Verdict] | None = None
    plain_form: Callable[[Problem], str] = _form_as_asked
    step_namespaces: Callable[[Problem], tuple[Any, Any]] | None = None
    guests: Guests | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def availability(self) -> Verdict:
        """Whether the backend can work on this machine; a yes is remembered."""
        found = self._memo.get("availability")
        if found is None:
            missing = [name for name in self.spec.requires if importlib.util.find_spec(name) is None]
            if missing:
                found = Verdict(False, f"not installed: {', '.join(missing)} ({self.spec.install})")
            else:
                found = self.probe()
            if found.ok:
                self._memo["availability"] = found
        return found

    @property
    def installed(self) -> bool:
        """Whether all required packages are there."""
        return all(importlib.util.find_spec(name) is not None for name in self.spec.requires)

    def verdict(self, call: Call, gradient: bool = False, *, named: bool = True) -> Verdict:
        """Whether the backend can run a call, with the reason. `named`: whether it was asked for by name."""
        spec = self.spec
        if "*" not in spec.families and call.family not in spec.families:
            return Verdict(False, f"takes {', '.join(spec.families)} arrays, not {call.family}")
        available = self.availability()
        if not available.ok:
            return available
        if call.operator not in spec.operators:
            return Verdict(False, f"has no {call.operator}")
        if call.form != "auto" and call.form not in spec.forms:
            return Verdict(False, f"has the forms {', '.join(spec.forms)}, not {call.form}")
        for dtype in call.dtypes:
            if dtype not in spec.dtypes:
                return Verdict(False, f"takes {', '.join(spec.dtypes)}, not {dtype}")
        if call.needs_grad and not spec.gradients:
            return Verdict(False, "has no gradients")
        if gradient and self.load_gradient is None:
            return Verdict(False, "has no gradient for hla.vjp")
        if not named:
            offered = self.offers(call)
            if not offered.ok:
                return offered
        return self.supports(call)

    def runner(self, operator: str) -> Runner:
        """The function that runs an operator; loaded once."""
        found = self._memo.get(operator)
        if found is None:
            found = self._memo[operator] = self.load(operator)
        return found

    def gradient(self, operator: str) -> Gradient:
        """The function behind `hla.vjp`; loaded once."""
        key = ("gradient", operator)
        found = self._memo.get(key)
        if found is None:
            assert self.load_gradient is not None
            found = self._memo[key] = self.load_gradient(operator)
        return found


_lock = threading.Lock()
_registry: Mapping[str, Backend] = MappingProxyType({})
_complete = False
generation = 0
"""Grows with every registration: caches of choices hold it in their keys."""


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Make a backend known under its spec's name.

    Args:
        backend: see `Backend`.
        replace: allow the name to be taken already.

    Raises:
        OptionError: the name is taken, is no identifier, or is reserved ("auto").

    Example:
        >>> import hla
        >>> from hla.backends import Backend, BackendSpec, registered
        >>> spec = BackendSpec(name="mirror", families=("numpy",), forms=("chunkwise",), priority=-1)
        >>> hla.register_backend(Backend(spec=spec, load=registered()["numpy"].load))
        >>> "mirror" in hla.backends.available()
        True
        >>> hla.backends.unregister_backend("mirror")
    """
    name = backend.spec.name
    if not name.isidentifier() or name == "auto":
        raise OptionError(message("name", "an identifier other than auto", repr(name), "Rename the backend."))
    registered()
    _add({name: backend}, replace)


def unregister_backend(name: str) -> None:
    """Forget a backend; UnknownBackendError when there is none of that name.

    Example:
        See `register_backend`.
    """
    global _registry, generation
    get(name)
    with _lock:
        _registry = MappingProxyType({n: b for n, b in _registry.items() if n != name})
        generation += 1


def _add(more: Mapping[str, Backend], replace: bool) -> None:
    global _registry, generation
    with _lock:
        taken = sorted(more.keys() & _registry.keys())
        if taken and not replace:
            raise OptionError(
                message("name", "a new name", f"{taken[0]!r}, which is taken", "Pass replace=True to replace.")
            )
        _registry = MappingProxyType({**_registry, **more})
        generation += 1


def registered() -> Mapping[str, Backend]:
    """All backends by name: an immutable snapshot. The first call loads the built-in ones and the entry points.

    Example:
        >>> import hla
        >>> hla.backends.registered()["numpy"].spec.families
        ('*',)
    """
    global _complete, _registry, generation
    if _complete:
        return _registry
    from hla.backends import builtin

    found = {**_from_entry_points(), **builtin()}  # a plug-in does not take a built-in name
    with _lock:
        if not _complete:
            _registry = MappingProxyType({**found, **_registry})
            generation += 1
            _complete = True
    return _registry


def _from_entry_points() -> dict[str, Backend]:
    """Backends of installed plug-ins; one that fails to load stays in the list with its error as the reason."""
    import importlib.metadata  # here, as it is most of the time that `import hla` would take

    result: dict[str, Backend] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            made = point.load()
            backend = made() if callable(made) else made
            if not isinstance(backend, Backend):
                raise TypeError(f"{point.value} is {type(backend).__name__}, not hla.backends.Backend")
        except Exception as error:  # any fault of a plug-in must reach its user as a reason, not break the others
            backend = _broken(point.name, f"plug-in {point.value} failed to load: {type(error).__name__}: {error}")
        result[backend.spec.name] = backend
    return result


def _broken(name: str, reason: str) -> Backend:
    def load(operator: str) -> Runner:
        raise RuntimeError(reason)

    return Backend(
        spec=BackendSpec(name=name, families=("*",), description=reason, priority=-100),
        load=load,
        probe=lambda: Verdict(False, reason),
    )


def get(name: str) -> Backend:
    """The backend of that name; UnknownBackendError with the closest name when there is none.

    Example:
        >>> import hla
        >>> hla.backends.get("numpy").spec.forms
        ('recurrent', 'scan', 'chunkwise', 'parallel')
    """
    found = registered().get(name)
    if found is None:
        raise unknown(name)
    return found


def unknown(name: Any, argument: str = "backend") -> UnknownBackendError:
    """The error for a name that is not registered; `argument` is where it was given."""
    import difflib

    names = sorted(registered())
    close = difflib.get_close_matches(str(name), [*names, "auto"], n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Register it with hla.register_backend, or choose one of these."
    return UnknownBackendError(message(argument, f"one of {', '.join([*names, 'auto'])}", repr(name), hint))
