"""One token at a time: `step`, the decode side of every operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from hla import arrays, plans
from hla.arrays import Array
from hla.backends import selection
from hla.checks import check_call, check_inputs
from hla.errors import DTypeError, OptionError, message
from hla.ops import adopt, execute
from hla.options import NAMES, Options, StepKeywords, unknown_keyword
from hla.states import State, describe_spec, is_state

_OWN = ("order", "inplace")
_NOT_HERE = ("segment_ids", "cu_seqlens", "initial_state", "return_state", "axis", "form", "chunk_size")
KEYWORDS = tuple(sorted((NAMES - set(_NOT_HERE)) | set(_OWN)))


def step(state: State, q_t: Array, k_t: Array, v_t: Array, **options: Unpack[StepKeywords]) -> tuple[Array, State]:
    r"""One token through the operator that made `state`: the streaming updates of Theorems 3.1 and 6.1 and of §7.

    HLA₂, for example: S ← γS + kkᵀ, F ← γ²F + (S q)vᵀ, o = qᵀF. Prefill followed by steps equals the whole sequence.

    Args:
        state: what the operator, `init_state`, `step` or `load_state` returned. The options that fixed its fields
            (mask, definition, normalize, ridge) are given again, as in any other call.
        q_t: (*batch, d).
        k_t: (*batch, d).
        v_t: (*batch, dv).
        **options: decay, log_decay (here *batch* without T), scale, normalize, eps, ridge, mask, definition,
            token_mask (*batch), order, backend, and inplace: write the new state into the old one's arrays, where
            the library has mutable arrays.

    Returns:
        (o_t, state): o_t (*batch, dv) in the dtype of v_t. The given state is not written to unless ``inplace=True``.

    Raises:
        OptionError: the state belongs to other options; `inplace` on JAX (donate the state to jit instead), or on
            arrays whose shape or dtype would change.
        ShapeError, DTypeError, MixedArrayError: as the operators.

    Example:
        >>> import numpy as np, hla
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 7, 4))
        >>> whole = hla.hla2(q, k, v, decay=0.9)
        >>> o, state = hla.hla2(q[:6], k[:6], v[:6], decay=0.9, return_state=True)
        >>> o_t, state = hla.step(state, q[6], k[6], v[6], decay=0.9)
        >>> bool(np.allclose(o_t, whole[6]))
        True
    """
    if arrays.is_compiling():
        from hla.backends.torch import compilation

        return compilation.step(state, (q_t, k_t, v_t), dict(options))
    return take_step(state, q_t, k_t, v_t, dict(options))


def take_step(state: State, q_t: Array, k_t: Array, v_t: Array, given: dict[str, Any]) -> tuple[Array, State]:
    """`step`, in plain Python."""
    key = plans.signature(state, q_t, k_t, v_t, given)
    plan = plans.find(key)
    if plan is not None:
        return plan.run(state, q_t, k_t, v_t, given)
    if not is_state(state):
        raise DTypeError(message("state", "a state", type(state).__name__, "Use return_state=True or init_state."))
    for name in given:
        if name not in KEYWORDS:
            raise unknown_keyword("step", name, KEYWORDS)
    options = dict(given)
    order, inplace = options.pop("order", None), options.pop("inplace", False)
    if not isinstance(inplace, bool):
        raise OptionError(message("inplace", "True or False", repr(inplace), "Pass a Python bool."))
    _check_order(state, order)
    try:
        check_inputs(q_t, k_t, v_t, 1)
    except DTypeError:
        adopted = adopt(options.get("backend"), (q_t, k_t, v_t), given)
        if adopted is None:
            raise
        output, following = take_step(state, *adopted.inputs, adopted.options)
        return adopted.back(output), following
    with arrays.at_home(v_t):
        return _take_step(key, state, (q_t, k_t, v_t), options, inplace, given)


def _take_step(
    key: Any,
    state: State,
    token: tuple[Array, Array, Array],
    options: dict[str, Any],
    inplace: bool,
    given: dict[str, Any],
) -> tuple[Array, State]:
    q, k, v = (x[..., None, :] for x in token)
    for name in ("log_decay", "token_mask"):
        x = options.get(name)
        if x is not None:
            arrays.namespace(x, name)
            options[name] = x[..., None]
    spec = state.spec
    read = Options(**options, initial_state=state, return_state=True)
    checked = check_call(spec.operator, q, k, v, read, spec.order or None)
    if inplace:
        allowed = not any(arrays.family(x) == "jax" or arrays.unwritable(x) for x in state)  # or `_write` will refuse
        checked = checked._replace(problem=replace(checked.problem, overwrite=allowed))
    backend = selection.resolve(selection.call_of(checked.problem, checked.form), plans.chosen(key, read.backend))
    output, following = execute(checked, read, backend)
    output = output[..., 0, :]
    if inplace:
        _write(state, following)
    plans.keep(key, checked, backend, state, following, given)
    return output, state if inplace else following


def _check_order(state: State, order: int | None) -> None:
    spec = state.spec
    own = spec.order or {"linear_attention": 1, "hla2": 2, "hla3": 3}.get(spec.operator)
    if order is not None and order != own:
        raise OptionError(message("order", f"{own}, as the state is of {describe_spec(spec)}", repr(order), "Drop it."))


def _write(state: State, following: State) -> None:
    """The new arrays into the old ones; all or nothing."""
    for field, old, new in zip(state._fields, state, following, strict=True):
        if arrays.family(old) == "jax":
            raise OptionError(
                message(
                    "inplace",
                    "False for JAX arrays",
                    "True",
                    "They are immutable: donate the state to jax.jit instead.",
                )
            )
        if old.shape != new.shape or old.dtype != new.dtype:
            raise OptionError(
                message("inplace", f"{field} of shape {new.shape}, {new.dtype}", f"{old.shape}, {old.dtype}",
                        "Take the returned state, or make it with init_state at the full batch shape.")
            )  # fmt: skip
        fault = arrays.unwritable(old)
        if fault:
            raise OptionError(message("inplace", "writable arrays", f"{fault} {field}", "Copy the state first."))
    for old, new in zip(state, following, strict=True):
        if not arrays.same_memory(old, new):  # else the backend has written there
            old[...] = new
