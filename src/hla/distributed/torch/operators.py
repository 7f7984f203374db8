"""The operators over a group of processes: checks, and how a call is put together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from hla import arrays
from hla.backends import Backend, selection
from hla.backends.torch.namespace import PLAIN
from hla.checks import Checked, check_call
from hla.distributed.rounds import METHODS, rounds
from hla.distributed.torch.agreement import Agreed, Claim, agree
from hla.distributed.torch.exchange import Exchanges
from hla.distributed.torch.groups import Group, Place, leave
from hla.distributed.torch.sums import slice_sums
from hla.distributed.torch.waiting import heard, tell
from hla.errors import BackendUnsupportedError, DTypeError, OptionError, message
from hla.family import Program, steps
from hla.ops import finish_states
from hla.options import Options, read_options
from hla.problem import Problem, States
from hla.rules import RHO, Rule, Term

_agreed: WeakKeyDictionary[ProcessGroup, set[Claim]] = WeakKeyDictionary()
"""Calls that have been found equal, by group, so that all its ranks forget alike; for tensors whose values are not at
hand."""
_REMEMBERED = 10_000
"""calls of a group"""


def at_hand(like: Tensor) -> bool:
    """Whether to read what others have sent costs no more than their answer."""
    return like.device.type == "cpu"


@dataclass(frozen=True)
class Session:
    """Several calls of which the ranks have agreed on as one, such as those of a layer."""

    place: Place
    exchanges: Exchanges
    lengths: tuple[int, ...] | None
    """tokens on each rank, where they have been told"""

    @classmethod
    def begin(
        cls,
        place: Place,
        like: Tensor,
        claim: Claim,
        wants_grad: bool,
        refusal: Exception | None,
        *,
        length: int,
        need_lengths: bool,
        check: bool | None = None,
    ) -> Session:
        """Raises `refusal`, or an error on all ranks where their claims differ; see `hla.distributed.torch`, `check`.

        `wants_grad`: whether an input of this rank does. `length`: its tokens.
        """
        with heard():
            place.check()
        equal = _agreed.setdefault(place.group, set())
        # after the first call the others are likely not to ask again
        known = claim in equal if refusal is None else bool(equal)
        agreed: Agreed | None = None
        if check is True or need_lengths or (check is None and (at_hand(like) or not known)):
            agreed = agree(place, like.device, claim, length, wants_grad and torch.is_grad_enabled(), refusal)
            if len(equal) >= _REMEMBERED:
                equal.clear()
            equal.add(claim)
        elif refusal is not None:
            if check is None:
                tell(refusal)
            raise refusal
        needs_grad = torch.is_grad_enabled() and (agreed is None or agreed.needs_grad)
        return cls(place, Exchanges(place, like.device, needs_grad), None if agreed is None else agreed.lengths)


@dataclass(frozen=True)
class Sharing:
    """How a call is shared, beside the operators' own keywords."""

    group: Group = None
    method: str = "auto"
    check: bool | None = None
    session: Session | None = None
    """of a layer, which has compared the calls"""
    refusal: Exception | None = None
    """what a caller has found wrong on this rank, which the others have to hear"""


def run(
    function: str, q: Any, k: Any, v: Any, given: dict[str, Any], sharing: Sharing, order: int | None = None
) -> Any:
    """An operator on this rank's slice."""
    session = sharing.session
    if sharing.refusal is not None and (session is not None or arrays.is_compiling()):
        raise sharing.refusal
    if arrays.is_compiling():
        from hla.distributed.torch import compilation

        return compilation.call(function, q, k, v, given, sharing, order)
    if session is not None:
        options = read_options(function, given)
        return Call(session.place, function, q, k, v, options, sharing.method, order).run(session)
    with heard():
        place = Place.of(sharing.group)
    call, session = begin(place, function, q, k, v, given, sharing, order)
    return call.run(session)


def begin(
    place: Place, function: str, q: Any, k: Any, v: Any, given: dict[str, Any], sharing: Sharing, order: int | None
) -> tuple[Call, Session]:
    """A call, checked and compared with those of the other ranks."""
    refusal: Exception | None = None
    call: Call | None = None
    claim: Claim = ()
    wants_grad = False
    known = sharing.check is None or isinstance(sharing.check, bool)
    try:
        if not known:
            got = repr(sharing.check)
            raise OptionError(message("check", "True, False or None", got, "None decides by the device."))
        if sharing.refusal is not None:
            raise sharing.refusal
        options = read_options(function, given)
        call = Call(place, function, q, k, v, options, sharing.method, order)
        values = sharing.check is True or (sharing.check is None and at_hand(v))
        claim, wants_grad = call.claim(values), call.wants_grad()
    except Exception as error:
        refusal = error
    session = Session.begin(
        place,
        v if isinstance(v, Tensor) else torch.empty(0),
        claim,
        wants_grad,
        refusal,
        length=0 if call is None else call.checked.problem.length,
        need_lengths=call is not None and call.offsets is not None,
        check=sharing.check if known else None,
    )
    assert call is not None
    return call, session


class Call:
    """A call of which the arguments are checked, as far as a rank can by itself."""

    def __init__(
        self,
        place: Place,
        function: str,
        q: Any,
        k: Any,
        v: Any,
        options: Options,
        method: str,
        order: int | None,
    ) -> None:
        self.place, self.function, self.options, self.order = place, function, options, order
        self.inputs = (q, k, v)
        self.method = method
        self.offsets: list[int] | None = None
        own = options
        if options.cu_seqlens is not None:
            self.offsets = _known_offsets(options.cu_seqlens)
            own = replace(options, cu_seqlens=None, initial_state=None)
            if options.segment_ids is not None:
                check_call(function, q, k, v, options, order)  # refuses both
        state = options.initial_state if isinstance(options.initial_state, tuple) else ()
        named = {"q": q, "k": k, "v": v}
        named |= {name: getattr(options, name) for name in ("decay", "log_decay", "scale")}
        for name, x in (*named.items(), *(("initial_state", x) for x in state)):
            _refuse_followed(name, x)
        self.by_sequence = self.offsets is not None and (options.return_state or options.initial_state is not None)
        self.checked = check_call(function, q, k, v, own, order)
        problem = self.checked.problem
        if arrays.family(v) != "torch":
            raise DTypeError(message("q, k, v", "torch tensors", arrays.family(v), "Use torch.as_tensor."))
        if self.method not in METHODS:
            raise OptionError(message("method", f"one of {', '.join(METHODS)}", repr(self.method), "Check it."))
        self.everything = problem.program.spec.mask == "none"
        if self.everything:
            if self.method == "segments" or self.offsets is not None or problem.starts is not None:
                got = 'method="segments"' if self.method == "segments" else "packed sequences"
                raise OptionError(
                    message("mask", f'"causal" or "prefix" with {got}', '"none"', "Pack less, or use one of these.")
                )
        else:
            rounds(problem.program.spec, self.method)
        self.backend: Backend = selection.resolve(selection.call_of(problem, self.checked.form), options.backend)

    def wants_grad(self) -> bool:
        """Whether a tensor of this rank requires a gradient."""
        options = self.options
        tensors = [*self.inputs, options.decay, options.log_decay, options.scale, *(options.initial_state or ())]
        return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)

    def claim(self, values: bool) -> Claim:
        """What must be the same on all ranks; of tensors, with their `values` or whether there are any."""
        problem, options = self.checked.problem, self.options
        q, k, v = problem.q, problem.k, problem.v

        def batch(x: Any) -> str:
            return "none" if x is None else str(tuple(x.shape[:-2]))

        def told(x: Any) -> str:
            return _digest_of_values(x) if values and isinstance(x, Tensor) else _presence(x)

        spec = problem.program.spec
        name = f"higher_order of order {spec.order}" if spec.order else spec.operator
        found = [
            ("operator", name),
            ("world size", str(self.place.size)),
            ("mask", spec.mask),
            ("definition", spec.definition),
            ("normalize", f"{spec.normalize}, eps = {problem.eps if spec.normalize else 0}"),
            ("ridge", f"{problem.ridge}"),
            ("scale", str(problem.scale) if isinstance(problem.scale, float) else told(options.scale)),
            ("method", self.method),
            ("return_state", str(options.return_state)),
            ("torch.is_grad_enabled()", str(torch.is_grad_enabled())),
            ("shape of q (batch; d)", f"{batch(q)}; {q.shape[-1]}"),
            ("shape of k (batch; d)", f"{batch(k)}; {k.shape[-1]}"),
            ("shape of v (batch; dv)", f"{batch(v)}; {v.shape[-1]}"),
            ("dtype of q, k, v", ", ".join(arrays.dtype_name(x.dtype) for x in (q, k, v))),
            ("decay", f"{float(options.decay)}" if arrays.is_number(options.decay) else told(options.decay)),
            ("log_decay", _presence(options.log_decay)),
            ("shape of decays (batch)", batch(problem.log_decay)),
            ("shape of token_mask (batch)", batch(problem.token_mask)),
            ("shape of segment_ids (batch)", batch(problem.starts)),
            ("cu_seqlens", "none" if self.offsets is None else told_offsets(self.offsets)),
        ]
        state = options.initial_state
        if state is None:
            found.append(("initial_state", "none"))
        else:
            shapes = ", ".join(f"{getattr(x, 'dtype', '?')} {tuple(getattr(x, 'shape', ()))}" for x in state)
            found.append(("initial_state", f"{type(state).__name__}: {shapes}"))
        return tuple(found)

    def run(self, session: Session) -> Any:
        """The call. From here on all ranks do the same."""
        try:
            return self._run(session)
        except BaseException as error:
            if not isinstance(error, Exception):  # as KeyboardInterrupt, on this rank alone
                leave(session.place.group)
            raise

    def _run(self, session: Session) -> Any:
        checked, exchanges = self.checked, session.exchanges
        if self.offsets is not None:
            assert session.lengths is not None
            checked = self._packed(session.lengths, self.offsets)
        problem = checked.problem
        if problem.starts is not None and self.offsets is None:
            problem = replace(problem, starts=_continued(self.place, problem.starts, self.options.segment_ids))
        length = problem.length
        if not length:  # a token that is skipped, so that everything has a gradient
            problem = _one_skipped(problem)
        problem = _tied(exchanges, problem)
        checked = checked._replace(problem=problem)
        finals: States = {}
        with arrays.undisturbed(PLAIN, problem.v):
            if self.everything:
                output = self._everything(problem, exchanges)
            else:
                output, finals = self._causal(checked, exchanges)
        output, *ends = exchanges.tied([output, *finals.values()])
        finals = dict(zip(finals, ends, strict=True))
        if not length:
            output = output[..., :0, :]
        output = arrays.moveaxis(PLAIN, output, -2, checked.axis)
        return (output, finish_states(checked, finals)) if checked.return_state else output

    def _packed(self, lengths: tuple[int, ...], offsets: list[int]) -> Checked:
        """The call with the packed sequences of this slice: as boundaries, or with states as sequences of their own,
        most of them empty."""
        total, q = sum(lengths), self.inputs[2]
        if offsets[0] != 0 or offsets[-1] != total or any(b < a for a, b in pairwise(offsets)):
            raise OptionError(
                message("cu_seqlens", f"non-decreasing offsets from 0 to the {total} tokens of all ranks",
                        f"{offsets[0]} … {offsets[-1]}", "Pass the offsets of the whole sequence on every rank.")
            )  # fmt: skip
        start = list(accumulate(lengths, initial=0))[self.place.rank]
        length = lengths[self.place.rank]
        if self.by_sequence:
            local = torch.tensor([min(max(x - start, 0), length) for x in offsets], dtype=torch.int64)
            options = replace(self.options, cu_seqlens=local)
            return check_call(self.function, *self.inputs, options, self.order)
        starts = torch.zeros((length, 1), dtype=torch.bool)
        starts[[x - start for x in set(offsets[:-1]) if start <= x < start + length]] = True
        problem = replace(self.checked.problem, starts=starts.to(q.device))
        return self.checked._replace(problem=problem)

    def _causal(self, checked: Checked, exchanges: Exchanges) -> tuple[Tensor, States]:
        """Sums, exchanges, and the operator from the states that enter the slice."""
        problem = checked.problem
        entering: States = {}
        finals: States = {}
        leading = () if not self.by_sequence else (len(cast(list[int], problem.cu_seqlens)) - 1,)
        own = {state.symbol for state in problem.program.states}
        for part, rule in rounds(problem.program.spec, self.method):
            sums = slice_sums(checked, self.options, part, rule, entering)
            sums, initial = _aligned(problem, part, sums, tuple(s for s in rule.symbols if s in own), leading)
            found, last = exchanges.run(rule, sums, initial, final=checked.return_state)
            entering |= found
            finals |= last
        started = replace(problem, initial=entering, return_state=False)
        output, _ = self.backend.runner(problem.program.spec.operator)(started)
        return output, finals

    def _everything(self, problem: Problem, exchanges: Exchanges) -> Tensor:
        """mask="none": what all tokens add up to is read by each."""
        streams = problem.streams(problem.q, problem.k, problem.v, problem.token_mask)
        totals: States = {}
        sizes = problem.shapes().state  # on every rank: a mask of an empty slice has no say
        for symbol, state, read in steps(problem.program):
            if symbol not in totals:
                total = (streams[state.key].mT @ streams[state.value]).expand(sizes[symbol])
                sums = {RHO: total.new_ones((1, 1)), symbol: total}
                added = Term(0, 0, "chain", ((symbol, True, False),)), Term(0, 0, "chain", ((symbol, False, False),))
                terms: dict[str, tuple[Term, ...]] = {symbol: added}
                rule, zero = Rule(problem.program, terms, False), {symbol: torch.zeros_like(total)}
                totals |= exchanges.run(rule, sums, zero, final=True)[1]
            if read is not None:
                streams[read.result] = streams[read.query] @ totals[symbol]
        return cast(Tensor, problem.finish(streams, problem.token_mask))


def _refuse_followed(name: str, x: Any) -> None:
    """An error for tensors that stand for more than their values, which the exchanges would lose."""
    if not isinstance(x, Tensor):
        return
    if hasattr(x, "device_mesh"):
        raise DTypeError(
            message(name, "a tensor of this rank", "a DTensor",
                    "Call inside torch.distributed.tensor.experimental.local_map.")
        )  # fmt: skip
    mapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    if mapped or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None):  # type: ignore[no-untyped-call]
        got = "a tensor of a torch.func transformation" if mapped else "one with a forward-mode tangent"
        raise BackendUnsupportedError(
            message(name, "a tensor for reverse mode, as of backward()", got, "Use torch.autograd over processes.")
        )


def _tied(exchanges: Exchanges, problem: Problem) -> Problem:
    """The problem with its inputs tied to the exchanges."""
    initial = problem.initial or {}
    given = [problem.q, problem.k, problem.v, problem.log_decay, problem.scale, *initial.values()]
    q, k, v, log_decay, scale, *states = exchanges.tied(given)
    made = dict(zip(initial, states, strict=True)) or None
    return replace(problem, q=q, k=k, v=v, log_decay=log_decay, scale=scale, initial=made)


def _aligned(
    problem: Problem, part: Program, sums: States, states: tuple[str, ...], leading: tuple[int, ...]
) -> tuple[States, States]:
    """Sums and initial states as they travel: with an axis of sequences in front, all batches of one rank."""
    given = problem.initial or {}
    zeros = {s: torch.zeros_like(sums[s]) for s in states}
    if not leading:
        return sums, {s: x + given[s].to(x.dtype) if s in given else x for s, x in zeros.items()}
    rank = max(len(problem.output_batch()), *(x.ndim - 3 for x in sums.values()))

    def aligned(x: Tensor) -> Tensor:
        return x.reshape(leading + (1,) * (rank + 3 - x.ndim) + tuple(x.shape[1:]))

    sums, zeros = ({s: aligned(x) for s, x in values.items()} for values in (sums, zeros))
    return sums, {s: x + given[s].to(x.dtype) if s in given else x for s, x in zeros.items()}


def _known_offsets(given: Any) -> list[int]:
    if not arrays.is_array(given) or arrays.dtype_name(given.dtype) not in arrays.INTEGER or given.ndim != 1:
        raise DTypeError(message("cu_seqlens", "an integer array (N + 1,)", f"{given!r:.60}", "Pass an integer array."))
    values = arrays.host_integers(given)
    if not values:
        raise OptionError(message("cu_seqlens", "offsets with known values", "none", "Pass cumulative lengths."))
    return values


def _presence(x: Any) -> str:
    return "none" if x is None else "a tensor"


def _digest_of_values(x: Tensor) -> str:
    data = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {tuple(x.shape)} with digest {hashlib.sha256(data).hexdigest()[:12]}"


def told_offsets(offsets: list[int]) -> str:
    """In a few words, that differ where the offsets do."""
    text = str(offsets)
    return text if len(text) < 60 else f"{len(offsets) - 1} sequences, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _continued(place: Place, starts: Tensor, segment_ids: Any) -> Tensor:
    """`starts`, in which the slice's first token starts a sequence only where the last id before it is another."""
    ids = torch.as_tensor(segment_ids, device=starts.device).to(torch.int64)
    length = starts.shape[-2]
    ids = ids.expand(*starts.shape[:-2], length)
    row = ids.new_zeros((2, *starts.shape[:-2]))
    if length:
        row[0], row[1] = ids[..., -1], 1
    heard = place.gather(row.reshape(-1)).reshape(place.size, *row.shape)
    if not length:
        return starts
    first = torch.ones_like(starts[..., 0, 0])
    for last, there in heard[: place.rank]:
        first = torch.where(there != 0, last != ids[..., 0], first)
    return torch.cat([first[..., None, None], starts[..., 1:, :]], dim=-2)


def _one_skipped(problem: Problem) -> Problem:
    """A problem of no tokens with one that is skipped."""

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros((*x.shape[:-2], 1, x.shape[-1]))], dim=-2)

    mask = problem.token_mask
    log_decay = problem.log_decay
    offsets = problem.cu_seqlens
    if log_decay is not None and not problem.constant:
        log_decay = longer(log_decay)
    return replace(
        problem,
        q=longer(problem.q),
        k=longer(problem.k),
        v=longer(problem.v),
        log_decay=log_decay,
        constant=log_decay is None,  # one token's is the same array
        token_mask=problem.v.new_zeros((1, 1), dtype=torch.bool) if mask is None else longer(mask),
        starts=None if problem.starts is None else longer(problem.starts),
        cu_seqlens=None if offsets is None else [*offsets[:-1], 1],
    )
