"""Running a problem: one pass over the tokens for each state of its program."""

from __future__ import annotations

import math
from typing import Any

import hla
import numpy as np
from hla import packing
from hla.backends import Verdict
from hla.family import steps
from hla.problem import Problem, States
from hla.testing import error_budget, expected, per_token_error

from hla_plugin_example import compiler


def run(problem: Problem) -> tuple[np.ndarray, States]:
    """The output (*batch, T, dv) and the final states."""
    if problem.cu_seqlens is not None:
        return packing.run(problem, run)
    with np.errstate(all="ignore"):  # NaN and infinity are no errors
        streams = problem.streams(problem.q, problem.k, problem.v, problem.token_mask)
        decay, initial, final = _decay(problem), problem.initial_states(), {}
        for symbol, state, read in steps(problem.program):
            query = None if read is None else streams[read.query]
            key, value = streams[state.key], streams[state.value]
            result, final[symbol] = _move_and_read(initial[symbol], decay**state.power, key, value, query)
            if read is not None:
                streams[read.result] = result
        return problem.finish(streams, problem.token_mask), final


def _decay(problem: Problem) -> np.ndarray:
    """γ of each token, (*batch, T): 0 where a sequence starts, 1 where there is none or the token is skipped."""
    ones = np.ones((problem.length, 1), problem.dtype)
    log_decay = problem.masked_log_decay(problem.log_decay, problem.token_mask)
    decay = ones if log_decay is None else ones * np.exp(log_decay)
    if problem.starts is not None:
        decay = np.where(problem.starts, 0, decay)
    return decay[..., 0].astype(problem.dtype, copy=False)


def _move_and_read(
    start: np.ndarray, decay: np.ndarray, key: np.ndarray, value: np.ndarray, query: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """What the query reads (*batch, T, dv), None without one, and the state (*batch, d, dv) after the last token.

    Only the query may have more batch entries than the state: where the state's axis is 1, all of them read it.
    """
    *batch, d, dv = start.shape
    T, dtype = key.shape[-2], start.dtype
    readers = np.broadcast_shapes(tuple(batch), () if query is None else query.shape[:-2])
    own = (*[1] * (len(readers) - len(batch)), *batch)
    state = start.reshape(*own, d, dv).copy()  # the caller's stays as it is
    decay = np.broadcast_to(decay, (*own, T))
    key, value = (np.broadcast_to(x, (*own, *x.shape[-2:])) for x in (key, value))
    result = None
    if query is not None:
        query = np.broadcast_to(query, (*readers, T, d))
        result = np.empty((*readers, T, dv), dtype)
    function = compiler.function(dtype.name)
    for entry in np.ndindex(*own):
        g, b, c = (np.ascontiguousarray(x[entry], dtype) for x in (decay, key, value))
        a = r = np.empty((0, T, 0), dtype)
        if query is not None:
            place = tuple(i if n == m else slice(None) for i, n, m in zip(entry, own, readers, strict=True))
            a = np.ascontiguousarray(query[place], dtype)
            r = np.empty((*a.shape[:-1], dv), dtype)
        function(T, math.prod(a.shape[:-2]), d, dv, *(x.ctypes.data for x in (g, b, c, a, r, state[entry])))
        if result is not None:
            result[place] = r
    return result, state.reshape(start.shape)


def check() -> Verdict:
    """HLA₂ against the definition."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(19, n)).astype("float32") for n in (5, 5, 7))
    try:
        o: Any = hla.hla2(q, k, v, backend="c_loop")
    except hla.BackendUnsupportedError as error:
        return Verdict(False, str(error))
    error = per_token_error(o, expected("hla2", q, k, v))
    if not error <= error_budget("hla2", "float32", 19, 5, dv=7):
        return Verdict(False, f"its results are wrong here: an error of {error:.1e}")
    return Verdict(True, "compiles, and agrees with the definition")
