"""`vjp`: gradients without a framework. The adjoint itself is `hla.gradients`; here are contract and bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from hla import arrays
from hla.arrays import Array
from hla.backends import Backend, selection
from hla.checks import Checked, check_call
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.ops import Adopted, adopt, execute
from hla.options import Keywords, Options, read_options, with_signature
from hla.states import from_arrays, is_state, to_arrays


class Gradients(NamedTuple):
    """Gradients of a call's inputs, each in its input's shape and dtype; None where the input was not given."""

    q: Array
    k: Array
    v: Array
    decay: Array | None
    log_decay: Array | None
    initial_state: Any
    scale: Array | None
    """of a scale that is an array"""


@with_signature
def vjp(
    operator: str, q: Array, k: Array, v: Array, *, order: int | None = None, **options: Unpack[Keywords]
) -> tuple[Any, Callable[..., Gradients]]:
    r"""An operator's value, and the function that pulls cotangents back to its inputs (§4, math "Gradients").

    Linear attention is closed under differentiation, and the family consists of it:

    $$dq = \mathrm{LA}(do, v, k), \quad dk = \mathrm{LA}^r(v, do, q), \quad dv = \mathrm{LA}^r(k, q, do)$$

    with LAʳ the same primitive run backwards in time. Works in any namespace. Memory O(inputs + (T/C)·d·dv): the inputs
    are kept, everything else is recomputed in `pull`.

    Args:
        operator: "linear_attention", "hla2", "ahla", "hla3" or "higher_order".
        q: as for the operator.
        k: as for the operator.
        v: as for the operator.
        order: of "higher_order".
        **options: as for the operator.

    Returns:
        (o, pull), or ((o, state), pull) with ``return_state=True``. ``pull(do)``, then ``pull((do, dstate))`` with a
        cotangent in the form of the state, returns `Gradients`: ``.q .k .v``, ``.decay`` or ``.log_decay``,
        ``.initial_state``, and ``.scale`` where that is an array, in the shapes (broadcast axes summed) and dtypes of
        the inputs; for a plain number `decay` an array without axes.

    Raises:
        ShapeError: a cotangent of another shape than the output.
        BackendUnsupportedError: a backend was named that has no gradient of its own.
        All that the operator raises.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 1))
        >>> o, pull = hla.vjp("linear_attention", x, x, x, decay=1.0)
        >>> grads = pull(np.ones((3, 1)))
        >>> grads.v[:, 0], float(grads.decay)
        (array([3., 2., 1.]), 4.0)
    """
    read = read_options("vjp", dict(options))
    try:
        with arrays.at_home(v):
            checked = check_call(operator, q, k, v, read, order)
            call = selection.call_of(checked.problem, checked.form)
            backend = selection.resolve(call, read.backend, gradient=True)
            value = execute(checked, read, backend)
    except DTypeError:
        adopted = adopt(read.backend, (q, k, v), dict(options))
        if adopted is None:
            raise
        return _adopted_vjp(operator, adopted, order)

    def pull(*cotangents: Any) -> Gradients:
        with arrays.at_home(v):
            return input_gradients(checked, read, backend, *_cotangents(checked, value, cotangents))

    return value, pull


def _adopted_vjp(operator: str, adopted: Adopted, order: int | None) -> tuple[Any, Callable[..., Gradients]]:
    """`vjp` of objects that are no arrays: output and gradients as the caller's library has them, states as arrays."""
    options, back = adopted.options, adopted.back
    value, pull = vjp(operator, *adopted.inputs, order=order, **options)

    def pulled(*cotangents: Any) -> Gradients:
        given = cotangents[0] if len(cotangents) == 1 and isinstance(cotangents[0], tuple) else cotangents
        d, *rest = given
        taken = adopt(options.get("backend"), (d, d, d), {})
        found = pull(d if taken is None else taken.inputs[0], *rest)
        return found._replace(
            **{name: back(x) for name, x in found._asdict().items() if x is not None and name != "initial_state"}
        )

    return (back(value[0]), value[1]) if options.get("return_state") else back(value), pulled


def input_gradients(checked: Checked, options: Options, backend: Backend, d_output: Array, d_state: Any) -> Gradients:
    """The gradients of a call's inputs from cotangents of its output and of its final states by symbol, or None."""
    problem = checked.problem
    d_output = arrays.moveaxis(problem.xp, d_output, checked.axis, -2)
    found = backend.gradient(problem.program.spec.operator)(problem, d_output, d_state)
    d_q, d_k, d_v = (arrays.moveaxis(problem.xp, x, -2, checked.axis) for x in (found.q, found.k, found.v))
    d_decay, d_log_decay = _decay_gradients(checked, options, found.log_decay)
    d_initial = _state_gradient(options, found.initial)
    d_scale = None if found.scale is None else _like(problem.xp, found.scale, options.scale)
    return Gradients(d_q, d_k, d_v, d_decay, d_log_decay, d_initial, d_scale)


def _cotangents(checked: Checked, value: Any, given: tuple[Any, ...]) -> tuple[Array, Any]:
    """(do, dstate by symbol or None) from pull(do), pull(do, dstate) or pull((do, dstate))."""
    if len(given) == 1 and isinstance(given[0], tuple) and not is_state(given[0]):
        given = given[0]
    wanted = 2 if checked.return_state else 1
    if len(given) != wanted:
        raise OptionError(
            message("pull", "(do, dstate), as return_state=True" if wanted == 2 else "one cotangent, do",
                    f"{len(given)} values", "Pass cotangents in the form of vjp's first value.")
        )  # fmt: skip
    output, d = (value[0] if checked.return_state else value), given[0]
    arrays.namespace(d, "do")
    arrays.same_library_and_device(output, "o", do=d)
    if d.shape != output.shape:
        raise ShapeError(
            message("do", f"the shape of o, {tuple(output.shape)}", f"{tuple(d.shape)}", "Pass do like o.")
        )
    if wanted == 1:
        return d, None
    d_state, state = given[1], value[1]
    if d_state is None:
        return d, None
    if type(d_state) is not type(state):
        raise OptionError(
            message(
                "dstate", type(state).__name__, type(d_state).__name__, "Pass a cotangent in the form of the state."
            )
        )
    for field, x, y in zip(state._fields, state, d_state, strict=True):
        if x.shape != y.shape:
            raise ShapeError(
                message(f"dstate.{field}", f"shape {tuple(x.shape)}", f"{tuple(y.shape)}", "Pass it like state.")
            )
    return d, to_arrays(d_state)


def _decay_gradients(checked: Checked, options: Options, d: Array | None) -> tuple[Array | None, Array | None]:
    """(decay's, log_decay's): from d log γ (*b, T or 1, 1) to the caller's array."""
    xp = checked.problem.xp
    if d is None:
        return None, None
    if options.log_decay is not None:
        given = options.log_decay
        d = arrays.sum_to(xp, d[..., 0], _padded(given.shape, d.ndim - 1))
        return None, _like(xp, xp.reshape(d, tuple(given.shape)), given)
    given = options.decay
    total = xp.sum(d, axis=(-2, -1), dtype=d.dtype)
    if not arrays.is_array(given):
        return _as_array(xp, xp.sum(total, dtype=d.dtype) / given), None
    total = arrays.sum_to(xp, total, _padded(given.shape, total.ndim))
    total = xp.reshape(total, tuple(given.shape))
    gamma = arrays.cast(xp, arrays.convert_option(xp, given, checked.problem.v), d.dtype)
    return _like(xp, _as_array(xp, total / gamma), given), None


def _as_array(xp: Any, x: Any) -> Array:
    """NumPy's sums are scalars. Others are left alone, as torch's asarray may take them out of their graph."""
    return xp.asarray(x) if arrays.is_numpy(xp) else x


def _padded(shape: Any, rank: int) -> tuple[int, ...]:
    return (*(1,) * (rank - len(shape)), *(int(n) for n in shape))


def _like(xp: Any, x: Array, given: Array) -> Array:
    return x if arrays.family(given) == "numpy" and not arrays.is_numpy(xp) else arrays.cast(xp, x, given.dtype)


def _state_gradient(options: Options, initial: Any) -> Any:
    state = options.initial_state
    if state is None:
        return None
    made = from_arrays(state.spec, initial)
    return type(made)(*(arrays.cast(arrays.namespace(x), x, y.dtype) for x, y in zip(made, state, strict=True)))
