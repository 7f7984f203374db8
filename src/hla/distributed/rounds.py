r"""What devices have to tell each other about their slices of a sequence, and in how many rounds.

A slice is summarised by states summed from zero over its tokens. Two ways, by the name of `method`:

"segments": the summary is a segment (`hla.segments`), and one round is enough whatever the operator's order. It is
wider than a state, as it must act on any state: HLA₂ sends S, C and F.

"stages": a state of a program (`hla.family`) is a plain decayed sum once its two streams are known, so that each stage
is linear attention with a summary of its own. States whose streams are inputs go first; those fed by reads of these
follow in the next round, when the states that enter each slice are known: HLA₂ sends S, then F. This is the
context-parallel primitive, composed: any order, any definition, matrices only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from hla.errors import OptionError, message
from hla.family import Program, Read, Spec, program, steps
from hla.rules import Rule, Term, has_matrices, rule

METHODS = ("auto", "segments", "stages")


class Round(NamedTuple):
    """One exchange."""

    program: Program
    """what runs over a slice's tokens before it: states and the reads that feed them"""
    rule: Rule
    """the states that are exchanged, and how those of two slices combine"""


@cache
def rounds(spec: Spec, method: str) -> tuple[Round, ...]:
    """The exchanges of an operator. With mask "none" the rule is not used: the states are added up."""
    if method not in METHODS:
        raise OptionError(message("method", f"one of {', '.join(METHODS)}", repr(method), "Check the spelling."))
    one = has_matrices(spec) and spec.definition == "exact" and spec.mask != "none"
    if method == "segments" and not one:
        kind = f"mask={spec.mask!r}, definition={spec.definition!r}, order {spec.order or 'up to 3'}"
        raise OptionError(
            message("method", '"stages" where segments are no matrices of the operator', f'"segments" with {kind}',
                    'Leave method at "auto".')
        )  # fmt: skip
    if one and method != "stages":
        found = rule(spec)
        return (Round(found.program, found),)
    return _stages(program(spec))


def _stages(whole: Program) -> tuple[Round, ...]:
    depth = _depths(whole)
    return tuple(_stage(whole, depth, n) for n in range(max(depth.values()) + 1))


def _depths(whole: Program) -> dict[str, int]:
    """In which round each state's streams are known."""
    stream: dict[str, int] = {"q": 0, "k": 0, "v": 0, "one": 0}
    found: dict[str, int] = {}
    for symbol, state, read in steps(whole):
        found[symbol] = max(stream[state.key], stream[state.value])
        if read is not None:
            stream[read.result] = max(stream[read.query], found[symbol] + 1)
    return found


def _stage(whole: Program, depth: dict[str, int], n: int) -> Round:
    own = tuple(state for state in whole.states if depth[state.symbol] == n)
    wanted = {name for state in own for name in (state.key, state.value)}
    kept: list[Read] = []
    for read in reversed(whole.reads):
        if read.result in wanted:
            state = whole.state(read.state)
            wanted |= {read.query, state.key, state.value}
            kept.insert(0, read)
    symbols = {read.state for read in kept} | {state.symbol for state in own}
    states = tuple(state for state in whole.states if state.symbol in symbols)
    terms: dict[str, tuple[Term, ...]] = {
        s.symbol: (Term(s.power, 0, "chain", ((s.symbol, True, False),)), _later(s.symbol)) for s in own
    }
    part = Program(whole.spec, states, tuple(kept), ())
    return Round(part, Rule(part, terms, False))


def _later(symbol: str) -> Term:
    return Term(0, 0, "chain", ((symbol, False, False),))
