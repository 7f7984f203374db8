"""Who is compared: the operators on a backend, and their peers, each as plain functions that `hla bench` times.

Peers: the library's softmax attention, a plain loop over tokens, a straightforward composition of chunked linear
attention, and flash-linear-attention's reference functions where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hla.cli import composition, softmax
from hla.cli.passes import Attend, Pull
from hla.cli.recurrence import STEPS, empty_states, token_loop
from hla.testing.libraries import Placement

Array: TypeAlias = Any
Step: TypeAlias = Callable[[Any, Array, Array, Array], tuple[Any, Array]]
"""(state, q_t, k_t, v_t) → (state, o_t)"""

PEERS = ("softmax", "loop", "composition", "fla")


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: for a reader; with backend and form it is unique.
        kind: "operator", or one of `PEERS`.
        operator: the operator that it computes, or "softmax".
        attend: (H, T, d), (H, T, d), (H, T, dv) → (H, T, dv).
        work: the form whose operations it executes, as `hla.cost` counts them; "" for the one that the backend takes.
        order: of "higher_order".
        backend: of an operator.
        form: of an operator, as asked for.
        pull: gradients where the library has none of its own.
        differentiable: whether a backward pass is to be timed at all.
        prepare: (q, k, v) of all tokens and a number n → the state after all but the last n.
        step: one token.
        decoded: how many steps `prepare` may be followed by.
    """

    name: str
    kind: str
    operator: str
    attend: Attend
    work: str = ""
    order: int | None = None
    backend: str | None = None
    form: str | None = None
    pull: Pull | None = None
    differentiable: bool = True
    prepare: Callable[[Array, Array, Array, int], Any] | None = None
    step: Step | None = None
    decoded: int = 2


def label(operator: str, order: int | None) -> str:
    """ "hla2", "higher_order:4"."""
    return operator if order is None else f"{operator}:{order}"


def operator_on(place: Placement, backend: str | None, operator: str, order: int | None, form: str) -> Contender:
    """The operator itself, on a backend, or on the one that is chosen automatically."""
    import hla

    named: dict[str, Any] = {} if order is None else {"order": order}
    chosen = {"backend": backend, "form": form, **named}

    def attend(q: Array, k: Array, v: Array) -> Array:
        return getattr(hla, operator)(q, k, v, **chosen)

    def pull(q: Array, k: Array, v: Array, do: Array) -> Any:
        o, pulled = hla.vjp(operator, q, k, v, **chosen)
        found = pulled(do)
        return o, (found.q, found.k, found.v)

    def prefill(q: Array, k: Array, v: Array) -> Any:
        return getattr(hla, operator)(q, k, v, return_state=True, backend=backend, **named)[1]

    def prepare(q: Array, k: Array, v: Array, last: int) -> Any:
        return place.compiled(prefill)(*(x[:, : x.shape[1] - last] for x in (q, k, v)))

    def step(state: Any, q: Array, k: Array, v: Array) -> Any:
        o, state = hla.step(state, q, k, v, backend=backend, **named)
        return state, o

    return Contender(
        label(operator, order), "operator", operator, attend, order=order, backend=backend, form=form, pull=pull,
        prepare=prepare, step=step,
    )  # fmt: skip


def peers_of(place: Placement, operator: str, order: int | None, kinds: tuple[str, ...]) -> list[Contender]:
    """What an operator is compared with, besides softmax attention."""
    from hla.cli.flash_linear_attention import find_references

    found = []
    name = label(operator, order)
    if "loop" in kinds and operator in STEPS:
        found.append(_loop(place, operator, name))
    if "composition" in kinds:
        found.append(_composition(place, operator, order, name))
    if "fla" in kinds and operator == "linear_attention" and place.library == "torch":
        for which, function in find_references().functions.items():
            work = "recurrent" if "recurrent" in which else "chunkwise"
            found.append(Contender(f"{name}, {which}", "fla", operator, function, work=work))
    return found


def _loop(place: Placement, operator: str, name: str) -> Contender:
    xp = place.xp

    def prepare(q: Array, k: Array, v: Array, last: int) -> Any:
        before = q.shape[1] - last
        if before == 0:
            return empty_states(xp, operator, *(_wide(xp, x) for x in (q, v)))
        return tuple(composition.states_after(xp, operator, *(x[:, :before] for x in (q, k, v))))

    def step(states: Any, q: Array, k: Array, v: Array) -> Any:
        states, o = STEPS[operator](states, *(_wide(xp, x) for x in (q, k, v)))
        return states, o if o.dtype == v.dtype else xp.astype(o, v.dtype)

    differentiable = place.library in ("torch", "jax")
    return Contender(
        f"{name}, loop", "loop", operator, token_loop(place, operator), work="recurrent",
        differentiable=differentiable, prepare=prepare, step=step,
    )  # fmt: skip


def _composition(place: Placement, operator: str, order: int | None, name: str) -> Contender:
    xp = place.xp

    def attend(q: Array, k: Array, v: Array) -> Array:
        return composition.attend(xp, operator, q, k, v, order=order)

    def pull(q: Array, k: Array, v: Array, do: Array) -> Any:
        return composition.attend_and_pull(xp, operator, q, k, v, do, order=order)

    return Contender(f"{name}, composed", "composition", operator, attend, work="chunkwise", order=order, pull=pull)


def softmax_peer(place: Placement) -> Contender:
    """Softmax attention, and one token of it against a full key-value cache."""

    def prepare(q: Array, k: Array, v: Array, last: int) -> Any:
        return k, v

    return Contender(
        "softmax", "softmax", "softmax", softmax.softmax_attention(place), pull=softmax.softmax_pull(place),
        prepare=prepare, step=softmax.softmax_step(place), decoded=1,
    )  # fmt: skip


def _wide(xp: Any, x: Array) -> Array:
    return x if x.dtype.itemsize > 2 else xp.astype(x, xp.float32)
