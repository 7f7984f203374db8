r"""The operators: documentation, checks, dispatch. The mathematics is `hla.family`; backends compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from hla import arrays
from hla.arrays import Array
from hla.backends import Backend, selection
from hla.backends.selection import Plan
from hla.checks import Checked, check_call
from hla.errors import DTypeError
from hla.options import Keywords, Options, read_options, with_signature
from hla.states import State, finished


@with_signature
def linear_attention(q: Array, k: Array, v: Array, **options: Unpack[Keywords]) -> Any:
    r"""Causal linear attention with decay: the first order of the family (§2.2).

    $$o_t = \sum_{j \le t} \Gamma(t,j)\,(q_t \cdot k_j)\, v_j, \qquad P_t = \gamma_t P_{t-1} + k_t v_t^\top,\quad
    o_t = q_t^\top P_t$$

    Args:
        q: (*batch, T, d), floating dtype, any library with an Array API namespace.
        k: (*batch, T, d). Batch axes broadcast: grouped heads are size-1 axes in k and v.
        v: (*batch, T, dv).
        **options: see [Options](options.md).

    Returns:
        o (*batch, T, dv) in the dtype, library and device of v; with ``return_state=True`` the pair (o, state), the
        state with the field ``key_value_moment`` (P) in float32, or float64 for float64 inputs.

    Raises:
        ShapeError: T, d or batch axes disagree.
        DTypeError: an input is no floating array.
        OptionError: an option is not allowed here.
        MixedArrayError: inputs of two libraries or devices.

    With ``normalize=True`` the output is divided by Σ_j Γ(t,j) q_t·k_j + eps (Eq. 3.4), which can be negative or near
    zero: that is the operator, not a fault.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 2), np.float32)
        >>> hla.linear_attention(x, x, x, decay=0.5)[:, 0]
        array([2. , 3. , 3.5], dtype=float32)
    """
    return _run("linear_attention", "linear_attention", q, k, v, options)


@with_signature
def hla2(q: Array, k: Array, v: Array, **options: Unpack[Keywords]) -> Any:
    r"""Second-order Higher-order Linear Attention, ((WWᵀ) ⊙ L) V (Theorem 3.1, Algorithm 1).

    $$o_t = \sum_{i \le j \le t} \Gamma(t,i)\,\Gamma(t,j)\,(q_t \cdot k_i)(k_i \cdot q_j)\, v_j,\qquad
    S_t = \gamma_t S_{t-1} + k_t k_t^\top,\quad F_t = \gamma_t^2 F_{t-1} + (S_t q_t) v_t^\top,\quad o_t = q_t^\top F_t$$

    The state is (S, F), d² + d·dv numbers per head; the paper's (S, C, G) with o = q(SC − G) holds the same but
    subtracts two large numbers. ``definition="as_printed"`` computes the printed recurrence of §4.3, which under decay
    is another operator (see [Errata](errata.md)).

    Args:
        q: (*batch, T, d), floating dtype, any library with an Array API namespace.
        k: (*batch, T, d). Batch axes broadcast: grouped heads are size-1 axes in k and v.
        v: (*batch, T, dv).
        **options: see [Options](options.md); ``ridge`` adds λI to S at read-out (Algorithm 1).

    Returns:
        o (*batch, T, dv) in the dtype, library and device of v; with ``return_state=True`` the pair (o, state), the
        state with the fields ``key_moment`` (S) and ``corrected_state`` (F).

    Raises:
        ShapeError: T, d or batch axes disagree.
        DTypeError: an input is no floating array.
        OptionError: an option is not allowed here.
        MixedArrayError: inputs of two libraries or devices.

    Outputs grow like t²: at scale 1 and unit variance float16 overflows within a few hundred tokens. With
    ``normalize=True`` the output is divided by the same sum with every v_j = 1, plus eps (Eq. 3.4), which can be
    negative or near zero.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 1), np.float32)
        >>> hla.hla2(x, x, x)[:, 0]
        array([1., 3., 6.], dtype=float32)
    """
    return _run("hla2", "hla2", q, k, v, options)


@with_signature
def ahla(q: Array, k: Array, v: Array, **options: Unpack[Keywords]) -> Any:
    r"""Asymmetric Higher-order Linear Attention, ((WW) ⊙ L) V (Theorem 6.1, Algorithm 2).

    $$o_t = \sum_{j \le i \le t} \Gamma(t,i)\,\Gamma(i,j)\,(q_t \cdot k_i)(q_i \cdot k_j)\, v_j,\qquad
    P_t = \gamma_t P_{t-1} + k_t v_t^\top,\quad E_t = \gamma_t E_{t-1} + k_t (q_t^\top P_t),\quad o_t = q_t^\top E_t$$

    Args:
        q: (*batch, T, d), floating dtype, any library with an Array API namespace.
        k: (*batch, T, d). Batch axes broadcast: grouped heads are size-1 axes in k and v.
        v: (*batch, T, dv).
        **options: see [Options](options.md).

    Returns:
        o (*batch, T, dv) in the dtype, library and device of v; with ``return_state=True`` the pair (o, state), the
        state with the fields ``key_value_moment`` (P) and ``cascade_state`` (E), 2·d·dv numbers per head.

    Raises:
        ShapeError: T, d or batch axes disagree.
        DTypeError: an input is no floating array.
        OptionError: an option is not allowed here.
        MixedArrayError: inputs of two libraries or devices.

    Outputs grow like t². With ``normalize=True`` the output is divided by the same sum with every v_j = 1, plus eps
    (Eq. 3.4), which can be negative or near zero.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 1), np.float32)
        >>> hla.ahla(x, x, x)[:, 0]
        array([1., 3., 6.], dtype=float32)
    """
    return _run("ahla", "ahla", q, k, v, options)


@with_signature
def hla3(q: Array, k: Array, v: Array, **options: Unpack[Keywords]) -> Any:
    r"""Third-order Higher-order Linear Attention, ((WWᵀ) ⊙ L) W V (§7).

    $$o_t = \sum_{u \le t;\, i,j \le u} \Gamma(t,i)\,\Gamma(t,u)\,\Gamma(t,j)\,(q_t \cdot k_i)(k_i \cdot q_u)
    (q_u \cdot k_j)\, v_j,\qquad F_t = \gamma_t^3 F_{t-1} + (S_t q_t)(q_t^\top P_t),\quad o_t = q_t^\top F_t$$

    ``definition="as_printed"`` computes Algorithm 3, which is another operator even without decay (see
    [Errata](errata.md)).

    Args:
        q: (*batch, T, d), floating dtype, any library with an Array API namespace.
        k: (*batch, T, d). Batch axes broadcast: grouped heads are size-1 axes in k and v.
        v: (*batch, T, dv).
        **options: see [Options](options.md).

    Returns:
        o (*batch, T, dv) in the dtype, library and device of v; with ``return_state=True`` the pair (o, state), the
        state with the fields ``key_moment`` (S), ``key_value_moment`` (P) and ``corrected_state`` (F).

    Raises:
        ShapeError: T, d or batch axes disagree.
        DTypeError: an input is no floating array.
        OptionError: an option is not allowed here.
        MixedArrayError: inputs of two libraries or devices.

    Outputs grow like t³: at scale 1 and unit variance float16 overflows after about 16 tokens. With
    ``normalize=True`` the output is divided by the same sum with every v_j = 1, plus eps (Eq. 3.4), which can be
    negative or near zero.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 1), np.float32)
        >>> hla.hla3(x, x, x)[:, 0]
        array([ 1.,  5., 14.], dtype=float32)
    """
    return _run("hla3", "hla3", q, k, v, options)


@with_signature
def higher_order(q: Array, k: Array, v: Array, *, order: int, **options: Unpack[Keywords]) -> Any:
    r"""The operator of any order ≥ 1, as a composition of the first three (§7).

    Order 1 is `linear_attention`, 2 is `hla2`, 3 is `hla3`. Order 2m applies HLA₂ m times to v; order 2m + 1 applies
    it m − 1 times to HLA₃(q, k, v), each with the decay, if any:

    $$o = \mathrm{HLA}_2(q, k, \mathrm{HLA}_2(q, k, \ldots v)), \qquad
    F^{(n)}_t = \gamma_t^2 F^{(n)}_{t-1} + (S_t q_t)\, o^{(n-1)\top}_t$$

    Args:
        q: (*batch, T, d), floating dtype, any library with an Array API namespace.
        k: (*batch, T, d). Batch axes broadcast: grouped heads are size-1 axes in k and v.
        v: (*batch, T, dv).
        order: the interaction degree, an integer ≥ 1.
        **options: see [Options](options.md). Above order 3: definition "exact", mask "causal" or "none", no ridge.

    Returns:
        o (*batch, T, dv) in the dtype, library and device of v; with ``return_state=True`` the pair (o, state). One
        S serves all stages, each further stage adds one d×dv matrix.

    Raises:
        ShapeError: T, d or batch axes disagree.
        DTypeError: an input is no floating array.
        OptionError: an option is not allowed here, or order < 1.
        MixedArrayError: inputs of two libraries or devices.

    With ``normalize=True`` the division by the same sum with every v_j = 1, plus eps, is made once, at the end.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 1), np.float32)
        >>> bool(np.all(hla.higher_order(x, x, x, order=4) == hla.hla2(x, x, hla.hla2(x, x, x))))
        True
    """
    return _run("higher_order", "higher_order", q, k, v, options, order)


def _run(function: str, operator: str, q: Any, k: Any, v: Any, given: Any, order: int | None = None) -> Any:
    if arrays.is_compiling():
        from hla.backends.torch import compilation

        return compilation.call(operator, q, k, v, given, order)
    options = read_options(function, given)
    try:
        with arrays.at_home(v):
            return execute(check_call(operator, q, k, v, options, order), options)
    except DTypeError:
        adopted = adopt(options.backend, (q, k, v), given)
        if adopted is None:
            raise
    own, taken, back = adopted
    found = _run(function, operator, *own, given=taken, order=order)
    return (back(found[0]), found[1]) if options.return_state else back(found)


class Adopted(NamedTuple):
    """Objects that are no arrays, as arrays of a backend that was named."""

    inputs: tuple[Array, Array, Array]
    options: dict[str, Any]
    back: Callable[[Array], Any]
    """from an array of the backend to what the caller's library has"""


def adopt(backend: Any, inputs: tuple[Any, Any, Any], options: dict[str, Any]) -> Adopted | None:
    """Take q, k, v and options of a library without an Array API, such as Numba; None where no backend was named that
    does, or where there is nothing to take."""
    guests = selection.guests(backend)
    if guests is None:
        return None
    q, k, v = map(guests.take, inputs)
    if all(x is y for x, y in zip((q, k, v), inputs, strict=True)):
        return None
    return Adopted((q, k, v), {name: guests.take(x) for name, x in options.items()}, guests.back(inputs[2]))


def execute(checked: Checked, options: Options, backend: Backend | None = None) -> Any:
    """Run a checked call on the backend given, or the one that the options, settings or circumstances choose."""
    problem = checked.problem
    if backend is None:
        backend = selection.resolve(selection.call_of(problem, checked.form), options.backend)
    output, states = backend.runner(problem.program.spec.operator)(problem)
    output = arrays.moveaxis(problem.xp, output, -2, checked.axis)
    if not checked.return_state:
        return output
    return output, finish_states(checked, states)


def finish_states(checked: Checked, states: Any) -> State:
    """The final states as the caller gets them."""
    problem = checked.problem
    batch = checked.batch
    if problem.cu_seqlens is not None:
        batch = (len(problem.cu_seqlens) - 1, *batch)
    return finished(problem.xp, problem.program, states, batch)


@with_signature
def explain(
    operator: str, q: Array, k: Array, v: Array, *, order: int | None = None, **options: Unpack[Keywords]
) -> Plan:
    """Which backend and form would run this call, who decided, and why not the others. Nothing runs.

    Args:
        operator: the operator's name.
        q: as for the operator.
        k: as for the operator.
        v: as for the operator.
        order: of "higher_order".
        **options: as for the operator.

    Returns:
        A `Plan`: ``backend``, ``form``, ``source`` ("argument", "context", "global", "env" or "auto") and
        ``candidates``, every backend with its reason for or against. Printing it shows all of it.

    Raises:
        The errors that the call itself would raise.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((3, 2), np.float32)
        >>> plan = hla.explain("hla2", x, x, x)
        >>> plan.backend, plan.form, plan.source
        ('numpy', 'chunkwise', 'auto')
    """
    read = read_options("explain", dict(options))
    try:
        with arrays.at_home(v):
            checked = check_call(operator, q, k, v, read, order)
    except DTypeError:
        adopted = adopt(read.backend, (q, k, v), dict(options))
        if adopted is None:
            raise
        return explain(operator, *adopted.inputs, order=order, **adopted.options)
    call = selection.call_of(checked.problem, checked.form)
    backend = selection.resolve(call, read.backend)
    return selection.explain_call(call, read.backend, backend.plain_form(checked.problem))
