r"""What goes on inside an operator: to see why a model does not train.

`spectrum` looks at the key moment S, `token_scales` at the size of outputs or gradients along a sequence,
`memory_length` at decays. `report` runs an operator once, forwards and backwards, and makes all three; `plot` draws it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from hla import arrays
from hla.arrays import Array
from hla.differentiation import vjp
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.ops import linear_attention
from hla.options import Keywords, with_signature
from hla.states import is_state

__all__ = ["Report", "Spectrum", "TokenScales", "memory_length", "plot", "report", "spectrum", "token_scales"]

_WITH_THE_TOKENS = ("decay", "log_decay", "token_mask", "segment_ids", "cu_seqlens")
_DRAWN = 16
"""Curves in one picture, at most."""


class Spectrum(NamedTuple):
    """What `spectrum` answers.

    Attributes:
        eigenvalues: (*batch, d), λ_1 ≥ … ≥ λ_d ≥ 0.
        effective_rank: (*batch,), (Σλ)² / Σλ²: between 1 and d, 0 where S is 0.
        condition: (*batch,), λ_1 / λ_d; ∞ where λ_d is 0.
    """

    eigenvalues: Array
    effective_rank: Array
    condition: Array


class TokenScales(NamedTuple):
    """What `token_scales` answers.

    Attributes:
        norm: (*batch, T), ‖o_t‖.
        exponent: (*batch,), the p of the t^p that fits best; NaN where fewer than two tokens have a norm above 0.
    """

    norm: Array
    exponent: Array


class Report(NamedTuple):
    """What `report` answers.

    Attributes:
        operator: the operator's name.
        spectrum: of S after the last token; None for operators without S, and bidirectional ones.
        output: of o.
        gradients: by "q", "k", "v": of the gradients; None without `do`.
        memory: (*batch, T), the memory length; None for bidirectional operators.
    """

    operator: str
    spectrum: Spectrum | None
    output: TokenScales
    gradients: dict[str, TokenScales] | None
    memory: Array | None


def spectrum(state: Any) -> Spectrum:
    r"""Eigenvalues of the key moment, in each head.

    $$S = \sum_j \Gamma(t, j)\, k_j k_j^\top, \qquad
    \text{effective rank} = \frac{(\sum_i \lambda_i)^2}{\sum_i \lambda_i^2}, \qquad
    \text{condition} = \frac{\lambda_1}{\lambda_d}$$

    S is symmetric and positive semidefinite. What rounding leaves of an eigenvalue 0, at most d·u·λ_1 with the unit
    roundoff u, is given as 0; of a matrix that is not finite all is NaN. An effective rank near 1 says that all keys
    point the same way.

    Args:
        state: a state with the field ``key_moment`` (hla2, hla3, higher_order), or S itself, (*batch, d, d). Of S the
            lower triangle is read.

    Returns:
        `Spectrum`, in the dtype and library of S.

    Raises:
        OptionError: a state without S.
        ShapeError: no square matrices.
        DTypeError: no state and no array in float32 or float64.

    Example:
        >>> import numpy as np, hla
        >>> k = np.asarray([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
        >>> _, state = hla.hla2(k, k, k, return_state=True)
        >>> found = hla.inspect.spectrum(state)
        >>> found.eigenvalues, float(found.condition), round(float(found.effective_rank), 2)
        (array([4., 2.]), 2.0, 1.8)
    """
    S = state
    if is_state(state):
        if "key_moment" not in state._fields:
            raise OptionError(
                message("state", "a state with key_moment, as of hla2 or hla3", type(state).__name__,
                        "Pass S itself: linear_attention(k, k, k, …, return_state=True)[1].key_value_moment.")
            )  # fmt: skip
        S = state.key_moment
    elif isinstance(state, tuple):
        raise DTypeError(
            message("state", "a state of an operator, or S", type(state).__name__,
                    "Of a layer's state pass one of state.operators.")
        )  # fmt: skip
    xp = arrays.namespace(S, "state")
    name = arrays.dtype_name(S.dtype)
    if name not in ("float32", "float64"):
        raise DTypeError(message("state", "float32 or float64", name, "Convert S; states have these dtypes."))
    if S.ndim < 2 or S.shape[-1] != S.shape[-2] or S.shape[-1] == 0:
        raise ShapeError(
            message("state", "square matrices (*batch, d, d), d ≥ 1", f"shape {tuple(S.shape)}", "Pass the key moment.")
        )
    finite = xp.all(xp.isfinite(S), axis=(-2, -1))
    found = xp.flip(xp.linalg.eigvalsh(xp.where(finite[..., None, None], S, xp.zeros_like(S))), axis=-1)
    unit = 2.0 ** (-24 if name == "float32" else -53)
    least = found[..., :1] * (int(S.shape[-1]) * unit)
    found = xp.where(found <= least, xp.zeros_like(found), found)
    found = xp.where(finite[..., None], found, xp.ones_like(found) * float("nan"))
    total = xp.sum(found, axis=-1, dtype=found.dtype)
    one = xp.ones_like(total)
    largest = xp.where(total > 0, found[..., 0], one)
    shares = found / largest[..., None]  # squares of the eigenvalues themselves may overflow
    squares = xp.sum(shares * shares, axis=-1, dtype=found.dtype)
    sums = xp.sum(shares, axis=-1, dtype=found.dtype)
    rank = sums * sums / xp.where(total > 0, squares, one)
    smallest = shares[..., -1]
    condition = xp.where(smallest > 0, one / xp.where(smallest > 0, smallest, one), one * float("inf"))
    return Spectrum(found, rank, xp.where(finite, condition, total))


def token_scales(o: Array, *, axis: int = -2) -> TokenScales:
    r"""The size of each token's output, or of its gradient, and how it grows.

    $$\lVert o_t \rVert = \Big(\sum_c o_{tc}^2\Big)^{1/2}, \qquad
    p = \frac{\sum_t (\log t - \overline{\log t})(\log \lVert o_t \rVert - \overline{\log \lVert o_t \rVert})}
    {\sum_t (\log t - \overline{\log t})^2}, \qquad t = 1 \dots T$$

    p is the exponent of the power law that fits best by least squares. Tokens with norm 0 or NaN do not count. Without
    decay and norms, outputs of random inputs grow like √t for linear attention, and faster for higher orders; p near 0
    is what a model wants.

    Args:
        o: (*batch, T, dv), any floating dtype: outputs, or gradients with respect to q, k, v or o.
        axis: the time axis; the last axis is that of the features.

    Returns:
        `TokenScales`, float64 for float64, else float32.

    Raises:
        DTypeError: `o` is no floating array.
        ShapeError: fewer than two axes.
        OptionError: `axis` is none of o's, or the last.

    Example:
        >>> import numpy as np, hla
        >>> t = np.arange(1.0, 6.0)
        >>> found = hla.inspect.token_scales(t[:, None] ** 2 * np.asarray([3.0, 4.0]))
        >>> found.norm, round(float(found.exponent), 6)
        (array([  5.,  20.,  45.,  80., 125.]), 2.0)
    """
    xp = arrays.namespace(o, "o")
    name = arrays.dtype_name(o.dtype)
    if name not in arrays.FLOATING:
        raise DTypeError(message("o", "a floating dtype", name, "Convert o to a floating dtype."))
    if o.ndim < 2:
        raise ShapeError(message("o", "(*batch, T, dv)", f"shape {tuple(o.shape)}", "Add the missing axes."))
    if not arrays.is_integer(axis) or not -o.ndim <= axis < o.ndim or axis % o.ndim == o.ndim - 1:
        raise OptionError(
            message("axis", f"an axis of o other than the last, −{o.ndim} … −2", repr(axis), "Pass the axis of time.")
        )
    with arrays.at_home(o), arrays.undisturbed(xp, o):
        x = arrays.cast(xp, arrays.moveaxis(xp, o, axis - o.ndim if axis >= 0 else axis, -2), _wide(xp, name))
        if x.shape[-1] == 0:
            norm = xp.sum(x, axis=-1, dtype=x.dtype)
        else:
            largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
            divisor = xp.where(largest > 0, largest, xp.ones_like(largest))
            shares = x / divisor  # so that squares do not overflow where things have gone wrong
            norm = divisor[..., 0] * xp.sqrt(xp.sum(shares * shares, axis=-1, dtype=x.dtype))
        length = int(norm.shape[-1])
        t = xp.arange(1, length + 1, dtype=x.dtype, **arrays.beside(o))
        counts = xp.astype(norm > 0, x.dtype, copy=False)
        log_t = xp.log(t) * xp.ones_like(norm)
        log_norm = xp.log(xp.where(norm > 0, norm, xp.ones_like(norm)))

        def mean(y: Array) -> Array:
            """Over the tokens that count."""
            return xp.sum(y * counts, axis=-1, keepdims=True, dtype=x.dtype) / total

        total = xp.sum(counts, axis=-1, keepdims=True, dtype=x.dtype)
        total = xp.where(total > 0, total, xp.ones_like(total))
        apart = (log_t - mean(log_t)) * counts
        above = xp.sum(apart * (log_norm - mean(log_norm)), axis=-1, dtype=x.dtype)
        below = xp.sum(apart * apart, axis=-1, dtype=x.dtype)
        enough = xp.sum(counts, axis=-1, dtype=x.dtype) >= 2
        below = xp.where(enough, below, xp.ones_like(below))
        exponent = xp.where(enough, above / below, xp.ones_like(below) * float("nan"))
    return TokenScales(norm, exponent)


def memory_length(log_decay: Array, **options: Any) -> Array:
    r"""How many tokens a state remembers, each counted by what its decays leave of it.

    $$M_t = \sum_{j \le t} \Gamma(t, j), \qquad \Gamma(t, j) = \prod_{s=j+1}^{t} \gamma_s$$

    So M_t = 1 + γ_t M_{t−1}. A constant γ tends to 1/(1 − γ), γ = 1 gives t, a reset 1.

    Args:
        log_decay: (*batch, T), log γ_t ≤ 0 in any floating dtype, −∞ for a reset: what the operators take.
        **options: `token_mask`, `segment_ids` or `cu_seqlens`, as for the operators; M is 0 at a token that is skipped.

    Returns:
        (*batch, T), float64 for float64, else float32.

    Raises:
        DTypeError: `log_decay` is no floating array.
        ShapeError: it has no axes.
        OptionError: a decay above 1, where values are known.
        All that `linear_attention` raises.

    Example:
        >>> import numpy as np, hla
        >>> hla.inspect.memory_length(np.log(np.full(4, 0.5)))
        array([1.   , 1.5  , 1.75 , 1.875])
    """
    xp = arrays.namespace(log_decay, "log_decay")
    name = arrays.dtype_name(log_decay.dtype)
    if name not in arrays.FLOATING:
        raise DTypeError(message("log_decay", "a floating dtype", name, "Pass log γ, in any floating dtype."))
    if log_decay.ndim == 0:
        raise ShapeError(
            message("log_decay", "(*batch, T)", "shape ()", "Repeat a constant: xp.full((T,), math.log(γ)).")
        )
    if not arrays.is_traced(log_decay) and bool(xp.any(log_decay > 0)):
        raise OptionError(
            message("log_decay", "numbers ≤ 0", "some above 0", "Pass log γ, with γ ≤ 1: xp.log(decay), not the decay.")
        )
    unknown = set(options) - set(_WITH_THE_TOKENS[2:])
    if unknown:
        raise TypeError(f"memory_length() got an unexpected keyword argument {min(unknown)!r}")
    like = xp.ones((*log_decay.shape, 1), dtype=_wide(xp, name), **arrays.beside(log_decay))
    o = linear_attention(like, like, like, log_decay=log_decay, **options)
    return o[..., 0]


@with_signature
def report(
    operator: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    do: Array | None = None,
    order: int | None = None,
    **options: Unpack[Keywords],
) -> Report:
    r"""All of it for one call of an operator: `spectrum`, `token_scales` of o and of gradients, `memory_length`.

    Args:
        operator: "linear_attention", "hla2", "ahla", "hla3" or "higher_order".
        q: as for the operator.
        k: as for the operator.
        v: as for the operator.
        do: the gradient with respect to o, in its shape; None leaves gradients out.
        order: of "higher_order".
        **options: as for the operator, without `return_state`.

    Returns:
        `Report`.

    Raises:
        OptionError: `return_state`, or an option that the operator refuses.
        All that the operator and `hla.vjp` raise.

    Example:
        >>> import numpy as np, hla
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 50, 8))
        >>> found = hla.inspect.report("hla2", q, k, v, do=v, decay=0.9)
        >>> found.spectrum.eigenvalues.shape, found.gradients["k"].norm.shape, round(float(found.memory[0, -1]), 1)
        ((2, 8), (2, 50), 9.9)
    """
    given = dict(options)
    if given.pop("return_state", False):
        raise OptionError(message("return_state", "none", "True", "The state's spectrum is in the report: drop it."))
    axis: Any = given.get("axis", -2)
    causal = given.get("mask", "causal") != "none"
    calling: Any = {**given, "order": order, "return_state": causal}
    value, pull = vjp(operator, q, k, v, **calling)
    o, state = value if causal else (value, None)
    gradients = None
    if do is not None:
        found = pull((do, None)) if causal else pull(do)
        gradients = {name: token_scales(getattr(found, name), axis=axis) for name in ("q", "k", "v")}
    memory = None
    if causal:
        xp = arrays.namespace(o, "o")
        ones = xp.ones_like(arrays.moveaxis(xp, o, axis, -2)[..., :1])
        ones = arrays.cast(xp, ones, _wide(xp, arrays.dtype_name(o.dtype)))
        told: Any = {name: given[name] for name in _WITH_THE_TOKENS if given.get(name) is not None}
        memory = linear_attention(ones, ones, ones, **told)[..., 0]
    return Report(
        operator,
        spectrum(state) if "key_moment" in getattr(state, "_fields", ()) else None,
        token_scales(o, axis=axis),
        gradients,
        memory,
    )


def plot(found: Report, path: str | os.PathLike[str], *, title: str = "") -> None:
    """A report as a picture: spectrum, sizes of outputs and gradients, memory length, each with its numbers below.

    Args:
        found: what `report` answered.
        path: where to; the ending says the format, .svg, .png or .pdf for example. An existing file is replaced.
        title: above all.

    Raises:
        ImportError: matplotlib is not installed; the message holds the pip command.
        DTypeError: `found` is no report.
        OptionError: an ending that matplotlib does not know.
        OSError: the file cannot be written.

    Example:
        See docs/inspect.md.
    """
    if not isinstance(found, Report):
        raise DTypeError(message("found", "a Report", type(found).__name__, "Pass what hla.inspect.report returned."))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            message("plot", "matplotlib", "no such package", 'Run: pip install "hla[cli]"'), name=error.name
        ) from None
    figure = Figure(layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise OptionError(
            message("path", f"a name that ends in .{', .'.join(sorted(known))}", os.fspath(path), "Change its ending.")
        )
    panels = _panels(found)
    figure.set_size_inches(4.5 * len(panels), 4.0)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    figure.suptitle(title or found.operator)
    figure.savefig(path)


class _Panel(NamedTuple):
    """One set of axes: curves (rows, points) by name, and what is said about them."""

    title: str
    curves: dict[str, Any]
    x: str
    y: str
    caption: str
    logarithmic: tuple[bool, bool]


def _panels(found: Report) -> list[_Panel]:
    panels = []
    if found.spectrum is not None:
        rank, condition = (_host(x).ravel() for x in found.spectrum[1:])
        panels.append(
            _Panel(
                "spectrum of S",
                {"": _host(found.spectrum.eigenvalues)},
                "i",
                "eigenvalue λ_i",
                f"effective rank {_range(rank)}, condition {_range(condition)}",
                (False, True),
            )
        )
    exponent = _range(_host(found.output.exponent))
    panels.append(
        _Panel("output", {"": _host(found.output.norm)}, "token t", "‖o_t‖", f"grows like t^p, p = {exponent}",
               (True, True))
    )  # fmt: skip
    if found.gradients is not None:
        fits = ", ".join(f"{name}: {_range(_host(x.exponent))}" for name, x in found.gradients.items())
        curves = {name: _host(x.norm) for name, x in found.gradients.items()}
        panels.append(_Panel("gradients", curves, "token t", "norm", f"t^p, p of {fits}", (True, True)))
    if found.memory is not None:
        memory = _host(found.memory)
        last = _range(memory[..., -1] if memory.shape[-1] else memory)
        panels.append(
            _Panel("memory", {"": memory}, "token t", "tokens remembered", f"at the end {last}", (False, False))
        )
    return panels


def _draw(axes: Any, panel: _Panel) -> None:
    shown = rows = 0
    any_above = False
    for i, (name, values) in enumerate(panel.curves.items()):
        lines = values.reshape(-1, values.shape[-1]) if values.size else values.reshape(0, 0)
        rows, shown = len(lines), min(len(lines), max(1, _DRAWN // len(panel.curves)))
        for j, line in enumerate(lines[:shown]):
            told = {"color": f"C{i}", "label": name if j == 0 else None, "alpha": 0.7} if name else {"alpha": 0.7}
            if panel.logarithmic[1]:
                line = [y if 0 < y < float("inf") else float("nan") for y in line]
                any_above = any_above or any(y == y for y in line)
            axes.plot(range(1, len(line) + 1), line, linewidth=1, **told)
    if panel.logarithmic[0]:
        axes.set_xscale("log")
    if any_above:
        axes.set_yscale("log")
    part = f"\nthe first {shown} of {rows} rows" if shown < rows else ""
    axes.set(title=panel.title, ylabel=panel.y)
    axes.set_xlabel(f"{panel.x}\n{panel.caption}{part}", fontsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _host(x: Array) -> Any:
    from hla.testing.libraries import to_numpy

    return to_numpy(x)


def _range(values: Any) -> str:
    """The least and the largest of some numbers, in words."""
    known = sorted(float(x) for x in values.ravel() if x == x)
    if not known:
        return "unknown"
    low, high = (f"{x:.3g}" for x in (known[0], known[-1]))
    return low if low == high else f"{low} … {high}"


def _wide(xp: Any, name: str) -> Any:
    """The dtype in which arrays of this one are added up."""
    return xp.float64 if name == "float64" else xp.float32
