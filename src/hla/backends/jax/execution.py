"""How a problem runs on JAX arrays: as one program under `jax.jit`, also where it is called from within another.

Derivatives are JAX's own, in every mode and order, through the plain operations of the core, whose loop over chunks
recomputes its bodies (`hla.loops`). The rule below only says where they are taken. Where none is wanted, another loop
gives the same values: it cuts each chunk out of the whole and writes the output in place, a third faster and without
memory that grows with T. Its derivative would add up arrays of the whole length at every step. (A `custom_vjp` would
forbid forward mode.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hla import forms
from hla.backends.jax.namespace import XP
from hla.family import Program
from hla.gradients import ProblemGradients
from hla.problem import Problem, States

_ARRAYS = ("q", "k", "v", "log_decay", "token_mask", "starts", "initial")


@dataclass(frozen=True)
class _Static:
    """What of a problem is part of the program: all that is no array. Equal problems share one compiled program."""

    program: Program
    dtype: Any
    constant: bool
    cu_seqlens: tuple[int, ...] | None
    scale: float | None
    eps: float
    ridge: float
    return_state: bool
    form: str
    chunk_size: int | None

    @classmethod
    def of(cls, problem: Problem) -> _Static:
        offsets = problem.cu_seqlens
        return cls(
            problem.program,
            problem.dtype,
            problem.constant,
            tuple(offsets) if isinstance(offsets, list) else None,
            None if problem.scale_varies else problem.scale,
            problem.eps,
            problem.ridge,
            problem.return_state,
            problem.form,
            problem.chunk_size,
        )

    def problem(self, arrays: dict[str, Any]) -> Problem:
        """The problem again, of these arrays."""
        return Problem(
            xp=XP,
            program=self.program,
            dtype=self.dtype,
            constant=self.constant,
            cu_seqlens=arrays["cu_seqlens"] if self.cu_seqlens is None else list(self.cu_seqlens),
            scale=arrays["scale"] if self.scale is None else self.scale,
            eps=self.eps,
            ridge=self.ridge,
            return_state=self.return_state,
            form=self.form,
            chunk_size=self.chunk_size,
            **{name: arrays[name] for name in _ARRAYS},
        )


def _arrays(problem: Problem) -> dict[str, Any]:
    offsets = problem.cu_seqlens
    return {
        **{name: getattr(problem, name) for name in _ARRAYS},
        "scale": problem.scale if problem.scale_varies else None,
        "cu_seqlens": None if isinstance(offsets, list) else offsets,
    }


@lru_cache(maxsize=1024)
def _compiled_run(static: _Static) -> Callable[..., tuple[Array, States]]:
    def derived(arrays: dict[str, Any]) -> tuple[Array, States]:
        return forms.run(static.problem(arrays))

    @jax.custom_jvp
    def hla_operator(arrays: dict[str, Any]) -> tuple[Array, States]:
        problem = static.problem(arrays)
        on_mesh = any(not jax.typeof(x).sharding.mesh.empty for x in (problem.q, problem.k, problem.v))
        if on_mesh or problem.cu_seqlens is not None:
            return forms.run(problem)
        shape = (*problem.output_batch(), problem.length, problem.v.shape[-1])
        return forms.run(replace(problem, out=jnp.zeros(shape, problem.v.dtype)))

    @hla_operator.defjvp
    def rule(primals: tuple[Any], tangents: tuple[Any]) -> Any:
        return jax.jvp(derived, primals, tangents)

    compiled: Callable[..., tuple[Array, States]] = jax.jit(hla_operator)
    return compiled


@lru_cache(maxsize=1024)
def _compiled_pull(static: _Static) -> Callable[..., ProblemGradients]:
    def hla_gradient(arrays: dict[str, Any], d_output: Array, d_final: States | None) -> ProblemGradients:
        return forms.pull(static.problem(arrays), d_output, d_final)

    compiled: Callable[..., ProblemGradients] = jax.jit(hla_gradient)
    return compiled


def run(problem: Problem) -> tuple[Array, States]:
    """Output and final states of any problem."""
    return _compiled_run(_Static.of(problem))(_arrays(problem))


def pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents of output and final states."""
    return _compiled_pull(_Static.of(problem))(_arrays(problem), d_output, d_final)
