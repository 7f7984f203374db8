r"""The exchange: from the sums of the slices to the states that enter them, and back.

With X_0 the initial state and A ⊕ B as in `hla.rules`, the state that enters slice r is X_r = X_{r−1} ⊕ sums_{r−1}. All
ranks gather all sums, rank 0's already moved on from X_0. Backwards, with d_r the cotangent of X_r by what rank r
computes from it and D that of the last state,

    λ_P = D,    λ_r = d_r + (∂X_{r+1}/∂X_r)ᵀ λ_{r+1},    d sums_r = (∂X_{r+1}/∂sums_r)ᵀ λ_{r+1},

so that all ranks gather all d_r, which are as large as a state: fewer numbers than the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hla.arrays import undisturbed
from hla.backends.torch.namespace import PLAIN
from hla.distributed.torch.groups import Place, pack, unpack
from hla.problem import States
from hla.rules import RHO, Rule, combine_values, pull_values

Shape = tuple[int, ...]


class Plan(NamedTuple):
    """One exchange."""

    place: Place
    rule: Rule
    fields: tuple[tuple[str, Shape], ...]
    """of sums: ρ and the rule's symbols"""
    states: tuple[str, ...]
    """those symbols that are states of the operator"""
    final: bool
    """whether the state after the last slice is wanted"""

    @property
    def shapes(self) -> list[Shape]:
        """Of the fields."""
        return [shape for _, shape in self.fields]

    @property
    def state_shapes(self) -> list[Shape]:
        """Of the states."""
        known = dict(self.fields)
        return [known[s] for s in self.states]


class Exchanges:
    """The exchanges of one call, each with its counterpart in the backward pass of every rank, in the same order.

    `needs_grad`: whether any rank wants a gradient. Then a tie, a number that does, leads from all inputs through all
    exchanges into all results, whatever else these depend on: no way back from a result to an input misses an exchange.
    """

    def __init__(self, place: Place, device: torch.device, needs_grad: bool) -> None:
        self.place = place
        self.tie = torch.zeros((), device=device, requires_grad=True) if needs_grad else None

    def run(self, rule: Rule, sums: States, initial: States, *, final: bool) -> tuple[States, States]:
        """(states that enter this rank's slice, states after the last slice or {}). `initial` has those symbols of the
        rule that are states of the operator."""
        fields = tuple((s, tuple(sums[s].shape)) for s in (RHO, *rule.symbols))
        plan = Plan(self.place, rule, fields, tuple(initial), final)
        given = [*(sums[s] for s, _ in fields), *initial.values()]
        tie, *found = Exchange.apply(plan, self.tie, *given)  # type: ignore[no-untyped-call]
        if self.tie is not None:
            self.tie = tie
        count = len(plan.states)
        return dict(zip(plan.states, found, strict=False)), dict(zip(plan.states, found[count:], strict=False))

    def tied(self, tensors: list[Any]) -> list[Any]:
        """The same tensors, tied to what has been and what will be tied or exchanged; others than tensors that want a
        gradient as they are."""
        if self.tie is None:
            return tensors
        wanted = [i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.requires_grad]
        self.tie, *found = Tie.apply(self.tie, *(tensors[i] for i in wanted))  # type: ignore[no-untyped-call]
        result = list(tensors)
        for i, x in zip(wanted, found, strict=True):
            result[i] = x
        return result


class Tie(torch.autograd.Function):
    """(tie, *tensors) as they are, in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views."""
        ctx.save_for_backward(tensors[0])
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor, ...]:
        """As they are; with a graph, tied to each other and to all exchanges so far."""
        return _tied(ctx.saved_tensors[0], d) if torch.is_grad_enabled() else d


def _tied(tie: Tensor, d: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of which each leads to what any of them, and the tie, depends on: a rank may go on from whichever."""
    there = [x for x in d if x is not None]
    _, *found = Tie.apply(tie, *there)  # type: ignore[no-untyped-call]
    left = iter(found)
    return tuple(None if x is None else next(left) for x in d)


class Exchange(torch.autograd.Function):
    """(plan, tie, *sums, *initial states) → (tie, *entering states, *final states). One collective each way."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, tie: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
        """Every rank combines what it has gathered."""
        sums, initial = _read(plan, given)
        others = plan.place.gather(pack(_message(plan, sums, initial), given[0].dtype))
        entering, final = _combine(plan, initial, others)
        ctx.plan, ctx.count = plan, len(given)
        later = others[plan.place.rank + 1 :].clone()  # those before have no part in the gradient
        ctx.save_for_backward(tie, *given, *(entering[s] for s in plan.states), later)
        results = [*(entering[s] for s in plan.states), *(final[s] for s in plan.states if final)]
        return given[0].new_zeros(()), *(x.clone() for x in results)

    @staticmethod
    def backward(ctx: Any, d_tie: Tensor, *d: Tensor) -> tuple[Any, ...]:
        """The adjoint, by hand; by autograd where that is to be differentiated again."""
        with undisturbed(PLAIN, d_tie):
            return Exchange._pull(ctx, d_tie, *d)

    @staticmethod
    def _pull(ctx: Any, d_tie: Tensor, *d: Tensor) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        tie, *saved = ctx.saved_tensors
        given, count = saved[: ctx.count], len(plan.states)
        if torch.is_grad_enabled():
            link, found = _pull_again(plan, tie, given, d)
            return (None, *_tied(link, (d_tie, *found)))
        heard = plan.place.gather(pack(list(d), given[0].dtype))
        d_states = [unpack(row, plan.state_shapes * (2 if plan.final else 1)) for row in heard]
        entering = dict(zip(plan.states, saved[ctx.count : ctx.count + count], strict=True))
        later = [_row(plan, row) for row in saved[-1]]
        sums, initial = _read(plan, given)
        cotangent = {s: torch.zeros_like(x) for s, x in entering.items()}
        if plan.final:
            for row in d_states:
                cotangent = {s: cotangent[s] + x for s, x in zip(plan.states, row[count:], strict=True)}
        befores = [_advance(plan, entering, sums)]
        for summary in later[:-1]:
            befores.append(_advance(plan, befores[-1], summary))
        first = plan.place.rank + 1
        for i in range(len(later) - 1, -1, -1):
            cotangent, _ = _pull(plan, befores[i], later[i], cotangent)
            cotangent = {s: cotangent[s] + x for s, x in zip(plan.states, d_states[first + i], strict=False)}
        d_initial, d_sums = _pull(plan, entering, sums, cotangent)
        made = [d_sums[s] for s, _ in plan.fields]
        if plan.place.rank == 0:
            return (None, d_tie, *made, *(d_initial[s] + x for s, x in zip(plan.states, d, strict=False)))
        return (None, d_tie, *made, *(torch.zeros_like(x) for x in initial.values()))


def _read(plan: Plan, given: Any) -> tuple[States, States]:
    count = len(plan.fields)
    sums = {s: x for (s, _), x in zip(plan.fields, given, strict=False)}
    return sums, dict(zip(plan.states, given[count:], strict=True))


def _row(plan: Plan, row: Tensor) -> States:
    return dict(zip((s for s, _ in plan.fields), unpack(row, plan.shapes), strict=True))


def _message(plan: Plan, sums: States, initial: States) -> list[Tensor]:
    """A rank's sums; the first's with the initial state before them."""
    if plan.place.rank == 0:
        sums = {**sums, **_advance(plan, initial, sums)}
    return [sums[s].expand(shape) for s, shape in plan.fields]


def _combine(plan: Plan, initial: States, others: Tensor) -> tuple[States, States]:
    rank = plan.place.rank
    states: States = {s: x for s, x in _row(plan, others[0]).items() if s in plan.states}
    entering = initial
    for i in range(1, plan.place.size):
        if i == rank:
            entering = states
        if i >= rank and not plan.final:
            break
        states = _advance(plan, states, _row(plan, others[i]))
    return entering, states if plan.final else {}


def _before(states: States, rho: Tensor) -> States:
    """States as they get past a slice: where a reset lies in it nothing does, not even NaN."""
    return {s: torch.where(rho == 0, 0.0, x) for s, x in states.items()}


def _advance(plan: Plan, states: States, summary: States) -> States:
    return combine_values(PLAIN, plan.rule, _before(states, summary[RHO]), summary, plan.states)


def _pull(plan: Plan, states: States, summary: States, d: States) -> tuple[States, States]:
    """The adjoint of `_advance`: cotangents of the states and of the summary."""
    rho = summary[RHO]
    moving = plan.rule._replace(terms={s: plan.rule.terms[s] for s in plan.states})
    one, zero = torch.ones_like(rho), torch.zeros_like(rho)
    earlier, later = pull_values(PLAIN, moving, {**_before(states, rho), RHO: one}, summary, {**d, RHO: zero})
    return {s: torch.where(rho == 0, 0.0, earlier[s]) for s in plan.states}, later


# A gradient of the gradient: gathering and its transpose are each other's derivatives.


class Gather(torch.autograd.Function):
    """(place, tie, (n,)) → tie, (size, n)."""

    @staticmethod
    def forward(ctx: Any, place: Place, tie: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """One collective."""
        ctx.place = place
        ctx.save_for_backward(tie)
        return x.new_zeros(()), place.gather(x).clone()

    @staticmethod
    def backward(ctx: Any, d_tie: Tensor, d: Tensor) -> tuple[Any, ...]:
        """What all ranks have for this one."""
        link, found = Collect.apply(ctx.place, *ctx.saved_tensors, d)  # type: ignore[no-untyped-call]
        return None, d_tie + link, found


class Collect(torch.autograd.Function):
    """(place, tie, (size, n)) → tie, (n,): row r of every rank, added up on rank r."""

    @staticmethod
    def forward(ctx: Any, place: Place, tie: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """One collective."""
        ctx.place = place
        ctx.save_for_backward(tie)
        heard = place.gather(x.reshape(-1)).reshape(place.size, place.size, -1)
        return x.new_zeros(()), heard[:, place.rank].sum(0)

    @staticmethod
    def backward(ctx: Any, d_tie: Tensor, d: Tensor) -> tuple[Any, ...]:
        """Everybody's, at its row."""
        link, found = Gather.apply(ctx.place, *ctx.saved_tensors, d)  # type: ignore[no-untyped-call]
        return None, d_tie + link, found


def _pull_again(
    plan: Plan, tie: Tensor, given: list[Tensor], d: tuple[Tensor, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """(tie of its exchanges, gradient with a graph), from the exchange in operations that can be differentiated."""
    with torch.enable_grad():
        copies = [x.view_as(x) if x.requires_grad else x for x in given]
        sums, initial = _read(plan, copies)
        own = pack(_message(plan, sums, initial), given[0].dtype)
        gathered, others = Gather.apply(plan.place, tie, own)  # type: ignore[no-untyped-call]
        # rank 0 reads nothing of the others: asking for the last state too keeps the collective in its graph
        entering, final = _combine(plan._replace(final=True), initial, others)
        results = [*(entering[s] for s in plan.states), *(final[s] for s in plan.states)]
        cotangents = [*d, *(torch.zeros_like(x) for x in results[len(d) :])]
        wanted = [tie, *(x for x in copies if x.requires_grad)]
        kept = [(x, y) for x, y in zip(results, cotangents, strict=True) if x.requires_grad]
        found = iter(torch.autograd.grad(
            [x for x, _ in kept], wanted, [y for _, y in kept], create_graph=True, allow_unused=True
        ))  # fmt: skip
        return next(found) + gathered, [next(found) if x.requires_grad else None for x in copies]
