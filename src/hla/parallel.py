"""Form "parallel": all T×T pairs at once, which is one chunk of T tokens."""

from __future__ import annotations

from hla.arrays import Array
from hla.chunkwise import advance, token_arrays
from hla.decays import Decays
from hla.problem import Problem, States


def run(problem: Problem) -> tuple[Array, States]:
    """The output (*batch, T, dv) and the final states, in O(T²) time and memory."""
    states, output = advance(problem, Decays.of(problem), problem.initial_states(), token_arrays(problem))
    return output, states
