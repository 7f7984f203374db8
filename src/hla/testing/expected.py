"""What an operator has to return, and the gradients it has to have: from `hla.reference`, in NumPy float64."""

from __future__ import annotations

from typing import Any

from hla import arrays, reference
from hla.arrays import Array
from hla.errors import OptionError, message
from hla.testing.libraries import to_numpy

_WITHOUT_EFFECT = ("form", "chunk_size", "backend", "return_state")
STEP = 2.0**-7
"""h of the finite differences."""
DIFFERENCE_ERROR = 1e-10
"""What six-point differences with h = 2⁻⁷ miss. They are exact for polynomials of degree 6, hence in single entries of
q, k and v; in a log-decay the truncation is h⁶/140·p⁷ ≤ 4·10⁻¹² for p ≤ 3. The rounding is u/h = 1.4·10⁻¹⁴ of the loss,
which may be some thousand times a gradient's scale."""


def expected(operator: str, q: Array, k: Array, v: Array, *, order: int | None = None, **options: Any) -> Any:
    """The output that the definition gives for a call of an operator.

    Args:
        operator: the operator's name.
        q: as for the operator, any library.
        k: as for the operator.
        v: as for the operator.
        order: of "higher_order".
        **options: the operator's own; those that do not change what is computed are ignored. No `initial_state`:
            pass all tokens from the first one on, and look at the last rows.

    Returns:
        A NumPy array in float64, of the output's shape.

    Raises:
        OptionError: `initial_state` was given, or the definition has no such option.

    Example:
        >>> import numpy as np
        >>> x = np.ones((3, 1), np.float32)
        >>> expected("hla2", x, x, x, decay=0.5)[:, 0]
        array([1.    , 1.75  , 2.1875])
    """
    axis = options.pop("axis", -2)
    import numpy as np

    q, k, v = (np.moveaxis(to_numpy(x), axis, -2) for x in (q, k, v))
    return np.moveaxis(reference.attend(operator, q, k, v, order=order, **_plain(options)), -2, axis)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """An operator's options as the definition takes them."""
    import numpy as np

    plain: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name == "initial_state":
            raise OptionError(message(name, "None", "a state", "Pass all tokens and compare the last rows."))
        if name == "decay":
            gamma = to_numpy(value) if arrays.is_array(value) else np.asarray(float(value))
            plain["log_decay"] = np.log(gamma)[..., None]
        elif name == "cu_seqlens":
            offsets = to_numpy(value)
            plain["segment_ids"] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        else:
            plain[name] = to_numpy(value) if arrays.is_array(value) else value
    plain.setdefault("scale", 1.0)
    plain["scale"] = float(plain["scale"])
    return plain


def expected_gradients(
    operator: str, q: Array, k: Array, v: Array, do: Array, *, order: int | None = None, **options: Any
) -> dict[str, Any]:
    r"""Gradients of Σ do·o with respect to q, k, v and decay or log_decay, by central differences of the definition.

    $$f'(x) \approx \frac{45(f_1 - f_{-1}) - 9(f_2 - f_{-2}) + (f_3 - f_{-3})}{60h}, \qquad f_i = f(x + ih)$$

    Every entry is moved on its own, so keep the inputs small.

    Args:
        operator: the operator's name.
        q: as for the operator.
        k: as for the operator.
        v: as for the operator.
        do: the cotangent, (*batch, T, dv).
        order: of "higher_order".
        **options: as for `expected`, without `axis`.

    Returns:
        Arrays in float64 by name: "q", "k", "v", and "decay" or "log_decay" where given.

    Example:
        >>> import numpy as np
        >>> x = np.ones((3, 1))
        >>> expected_gradients("linear_attention", x, x, x, x)["v"][:, 0].round(9)
        array([3., 2., 1.])
    """
    import numpy as np

    plain = _plain(options)
    arguments = {"q": to_numpy(q), "k": to_numpy(k), "v": to_numpy(v)}
    cotangent = to_numpy(do)
    if "log_decay" in plain:
        arguments["log_decay"] = plain.pop("log_decay")
    steps = STEP * np.array([1, -1, 2, -2, 3, -3], dtype=float)
    found = {}
    for name, x in arguments.items():
        # (6 steps, entries, *batch, …): the definition takes the first two as batch axes.
        rank = cotangent.ndim - (1 if name == "log_decay" else 0)
        aligned = (*(1,) * (rank - x.ndim), *x.shape)
        one_by_one = np.eye(x.size).reshape(1, x.size, *aligned)
        given = {**arguments, name: x + steps.reshape(6, 1, *(1,) * rank) * one_by_one}
        output = reference.attend(
            operator, given["q"], given["k"], given["v"], order=order, log_decay=given.get("log_decay"), **plain
        )
        loss = (output * cotangent).reshape(6, x.size, -1).sum(axis=-1)
        plus = loss[0::2] - loss[1::2]
        found[name] = ((45 * plus[0] - 9 * plus[1] + plus[2]) / (60 * STEP)).reshape(x.shape)
    if options.get("decay") is not None:
        slope = found.pop("log_decay")[..., 0]
        gamma = np.exp(arguments["log_decay"][..., 0])
        found["decay"] = slope / gamma
    return found
