"""From a caller's arguments to a `Problem`: every check of the contract, in the order in which a reader would ask.

Shapes and dtypes are always checked. Values are checked only where they are at hand for nothing: Python numbers and
NumPy option arrays. Arrays on a device and traced arrays are never read, except `cu_seqlens`, which lays out the work.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

from hla import arrays
from hla.arrays import Array, Namespace, broadcast_shapes, dtype_name
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.family import DEFINITIONS, MASKS, OPERATORS, Spec, program
from hla.options import FORMS, Options
from hla.problem import Problem, States

BY_ORDER = {1: "linear_attention", 2: "hla2", 3: "hla3"}


class Checked(NamedTuple):
    """A call that passed: the problem and what the caller wants back."""

    problem: Problem
    batch: tuple[int, ...]
    """the full batch shape of the output"""
    axis: int
    """where time goes in the output"""
    return_state: bool
    form: str
    """as asked, possibly "auto" """


def spec_of(operator: str, options: Options, order: int | None = None) -> Spec:
    """The mathematics that an operator's name and options fix; OptionError for combinations that are not defined."""
    if operator not in OPERATORS:
        raise OptionError(message("operator", f"one of {', '.join(OPERATORS)}", repr(operator), "Check the spelling."))
    operator, order = _resolve_order(operator, order)
    mask, definition, ridge = options.mask, options.definition, options.ridge
    _one_of("mask", mask, MASKS)
    _one_of("definition", definition, DEFINITIONS)
    _flag("normalize", options.normalize)
    if not arrays.is_number(ridge) or not math.isfinite(ridge):
        raise OptionError(message("ridge", "a finite number", repr(ridge), "Pass λ of Algorithm 1, 0 for none."))
    if ridge != 0 and operator != "hla2":
        raise OptionError(
            message("ridge", f"0 for {operator}", repr(ridge), "Algorithm 1's ridge exists for hla2 only.")
        )
    if definition == "as_printed":
        if operator not in ("hla2", "hla3"):
            raise OptionError(
                message(
                    "definition",
                    f'"exact" for {operator}',
                    '"as_printed"',
                    "Only hla2 and hla3 are printed differently.",
                )
            )
        if mask != "causal":
            raise OptionError(
                message("mask", '"causal" with definition="as_printed"', repr(mask), "Drop one of the two.")
            )
    if order and mask == "prefix":
        raise OptionError(message("mask", '"causal" or "none" for orders above 3', '"prefix"', "Choose one of these."))
    if operator == "linear_attention" and mask == "prefix":
        mask = "causal"  # the same sum, hence the same state
    return Spec(operator, mask, definition, order, options.normalize, ridge != 0)


def _resolve_order(operator: str, order: int | None) -> tuple[str, int]:
    if operator != "higher_order":
        expected = {name: n for n, name in BY_ORDER.items()}.get(operator, 2)
        if order is not None and order != expected:
            raise OptionError(
                message("order", f"{expected} for {operator}", repr(order), "Use higher_order for others.")
            )
        return operator, 0
    if order is None or not arrays.is_integer(order):
        raise OptionError(message("order", "an integer ≥ 1", repr(order), "Pass order=…, e.g. order=2 for hla2."))
    if order < 1:
        raise OptionError(message("order", "an integer ≥ 1", repr(order), "Order 1 is linear attention."))
    order = int(order)
    return (BY_ORDER[order], 0) if order in BY_ORDER else ("higher_order", order)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(message(name, f"one of {', '.join(allowed)}", repr(value), "Check the spelling."))


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(message(name, "True or False", repr(value), "Pass a Python bool."))


def check_inputs(q: Any, k: Any, v: Any, rank: int) -> Namespace:
    """The common namespace of q, k, v; errors for anything that is not a floating array of at least `rank` axes."""
    xp = arrays.namespace(q, "q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        arrays.namespace(x, name)
        found = dtype_name(x.dtype)
        if found not in arrays.FLOATING:
            raise DTypeError(
                message(
                    name,
                    f"a floating dtype ({', '.join(arrays.FLOATING)})",
                    found,
                    f"Convert {name} to a floating dtype.",
                )
            )
        if x.ndim < rank:
            raise ShapeError(
                message(name, f"at least {rank} axes", f"shape {tuple(x.shape)}", "The layout is (*batch, T, d).")
            )
    arrays.same_library_and_device(q, "q", k=k, v=v)
    return xp


def accumulation_dtype(xp: Namespace, *inputs: Array) -> Any:
    """float64 if any input is, else float32."""
    return xp.float64 if any(dtype_name(x.dtype) == "float64" for x in inputs) else xp.float32


def check_call(operator: str, q: Any, k: Any, v: Any, options: Options, order: int | None = None) -> Checked:
    """All checks of an operator call."""
    spec = spec_of(operator, options, order)
    _check_plain_options(options)
    xp = check_inputs(q, k, v, 2)
    axis = _check_axis(options.axis, q, k, v)
    if axis != -2:
        q, k, v = (arrays.moveaxis(xp, x, axis, -2) for x in (q, k, v))
    batch = check_shapes(q, k, v, options.axis)
    length = q.shape[-2]
    dtype = accumulation_dtype(xp, q, k, v)
    log_decay, constant = _check_decays(xp, options, v, batch, length, dtype)
    token_mask = None
    if options.token_mask is not None:
        token_mask = _token_option(xp, "token_mask", options.token_mask, v, batch, length, ("bool",))[..., None]
        if log_decay is not None and constant:  # a skipped token does not decay the state
            constant, log_decay = False, xp.broadcast_to(log_decay, (*log_decay.shape[:-2], length, 1))
    starts, cu_seqlens = _check_packing(xp, options, v, batch, length)
    if spec.mask == "none":
        _check_bidirectional(options, log_decay)
    initial = None
    if options.initial_state is not None:
        initial = check_state(options.initial_state, spec, v, batch, q, v, dtype, cu_seqlens)
    if starts is not None and (initial is not None or options.return_state):
        raise OptionError(
            message("segment_ids", "no state beside it", "a state", "Use cu_seqlens: its states have a leading axis N.")
        )
    problem = Problem(
        xp=xp,
        program=program(spec),
        q=q,
        k=k,
        v=v,
        dtype=dtype,
        log_decay=log_decay,
        constant=constant,
        token_mask=token_mask,
        starts=starts,
        cu_seqlens=cu_seqlens,
        initial=initial,
        scale=_check_scale(xp, options.scale, v, dtype),
        eps=float(options.eps),
        ridge=float(options.ridge),
        return_state=options.return_state,
        form=options.form,
        chunk_size=None if options.chunk_size is None else int(options.chunk_size),
    )
    return Checked(problem, batch, axis, options.return_state, options.form)


def _check_plain_options(options: Options) -> None:
    _one_of("form", options.form, FORMS)
    _flag("return_state", options.return_state)
    size = options.chunk_size
    if size is not None and (not arrays.is_integer(size) or size < 1):
        raise OptionError(message("chunk_size", "an integer ≥ 1 or None", repr(size), "None lets the backend choose."))
    if not arrays.is_number(options.eps) or not options.eps >= 0:
        raise OptionError(message("eps", "a number ≥ 0", repr(options.eps), "Pass a small number, e.g. 1e-6."))
    if options.decay is not None and options.log_decay is not None:
        raise OptionError(message("decay", "decay or log_decay", "both", "Pass one of them; log_decay = log(decay)."))
    if options.segment_ids is not None and options.cu_seqlens is not None:
        raise OptionError(message("segment_ids", "segment_ids or cu_seqlens", "both", "They say the same: pass one."))


def _check_axis(axis: Any, *inputs: Array) -> int:
    if not arrays.is_integer(axis):
        raise OptionError(message("axis", "an integer", repr(axis), "Pass the time axis, e.g. -2 or -3."))
    rank, given = min(x.ndim for x in inputs), axis
    if axis >= 0:
        if any(x.ndim != rank for x in inputs):
            raise OptionError(
                message("axis", "a negative axis for inputs of different rank", repr(axis), "Count from the end.")
            )
        axis = axis - rank
    if not -rank <= axis <= -2:
        raise OptionError(
            message(
                "axis", f"an axis from {-rank} to -2 (the last axis holds features)", repr(given), "Move the time axis."
            )
        )
    return int(axis)


def check_shapes(q: Array, k: Array, v: Array, axis: int = -2) -> tuple[int, ...]:
    """The batch shape; ShapeError unless q and k agree in d, all three in T, and the batch axes broadcast."""
    layout = "(*batch, T, d)" if axis == -2 else f"time on axis {axis}"
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            message(
                "k", f"the feature size of q, d = {q.shape[-1]}", f"d = {k.shape[-1]}", "q and k share their last axis."
            )
        )
    for name, x in (("k", k), ("v", v)):
        if x.shape[-2] != q.shape[-2]:
            raise ShapeError(
                message(
                    name, f"T = {q.shape[-2]} tokens as in q ({layout})", f"T = {x.shape[-2]}", "Pass equal lengths."
                )
            )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ShapeError(
            message("q and v", "at least one feature", f"d = {q.shape[-1]}, dv = {v.shape[-1]}", "Check the last axis.")
        )
    try:
        return broadcast_shapes(tuple(q.shape[:-2]), tuple(k.shape[:-2]), tuple(v.shape[:-2]))
    except ValueError:
        got = f"q {tuple(q.shape[:-2])}, k {tuple(k.shape[:-2])}, v {tuple(v.shape[:-2])}"
        raise ShapeError(
            message("q, k, v", "batch axes that broadcast", got, "For grouped heads insert a size-1 axis in k and v.")
        ) from None


def _check_scale(xp: Namespace, scale: Any, like: Array, dtype: Any) -> Any:
    if arrays.is_number(scale):
        return float(scale)
    if arrays.is_array(scale) and scale.ndim == 0 and dtype_name(scale.dtype) in arrays.FLOATING:
        return arrays.cast(xp, _option_array(xp, "scale", scale, like), dtype)
    raise OptionError(message("scale", "a number or a floating array without axes", _describe(scale), "Try d**-0.5."))


def _describe(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{dtype_name(x.dtype)} array of shape {tuple(x.shape)}"
    return repr(x)


def _option_array(xp: Namespace, name: str, x: Any, like: Array) -> Array:
    """An option array in the library of the inputs; NumPy arrays are taken as host data by every library."""
    arrays.namespace(x, name)
    x = arrays.convert_option(xp, x, like)
    arrays.same_library_and_device(like, "v", **{name: x})
    return x


def _fits(name: str, x: Array, wanted: tuple[int, ...], words: str) -> None:
    """ShapeError unless x broadcasts to the wanted shape."""
    shape = tuple(x.shape)
    try:
        fits = broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            message(name, f"an array that broadcasts to {words} = {wanted}", f"shape {shape}", "Add or drop axes.")
        )


def _token_option(
    xp: Namespace, name: str, x: Any, like: Array, batch: tuple[int, ...], length: int, kinds: tuple[str, ...]
) -> Array:
    """An option array of shape broadcastable to (*batch, T), its last axis expanded to T."""
    x = _option_array(xp, name, x, like)
    if dtype_name(x.dtype) not in kinds:
        raise DTypeError(message(name, f"dtype {' or '.join(kinds)}", dtype_name(x.dtype), "Convert it."))
    _fits(name, x, (*batch, length), "(*batch, T)")
    if x.ndim == 0 or x.shape[-1] != length:
        x = xp.broadcast_to(x, (*x.shape[:-1], length))
    return x


def _check_decays(
    xp: Namespace, options: Options, like: Array, batch: tuple[int, ...], length: int, dtype: Any
) -> tuple[Array | None, bool]:
    """(log decay, whether constant): (*b, T, 1) per token, (*b, 1, 1) constant, None for γ = 1."""
    if options.log_decay is not None:
        x = _token_option(xp, "log_decay", options.log_decay, like, batch, length, arrays.FLOATING)
        source = options.log_decay
        if arrays.family(source) == "numpy" and source.size and bool((source > 0).any()):
            raise OptionError(
                message("log_decay", "values ≤ 0", f"maximum {source.max()}", "log γ of a γ in (0, 1] is ≤ 0.")
            )
        return arrays.cast(xp, x, dtype)[..., None], False
    decay = options.decay
    if decay is None:
        return None, True
    if isinstance(decay, bool) or arrays.is_number(decay):
        if isinstance(decay, bool) or not 0 < decay <= 1:
            raise OptionError(
                message("decay", "a number in (0, 1]", repr(decay), "γ multiplies the state at every token.")
            )
        return xp.full((1, 1), math.log(decay), dtype=dtype, **arrays.beside(like)), True
    if not arrays.is_array(decay):
        raise DTypeError(message("decay", "a number or a floating array", _describe(decay), "Pass γ in (0, 1]."))
    source = decay
    x = _option_array(xp, "decay", decay, like)
    if dtype_name(x.dtype) not in arrays.FLOATING:
        raise DTypeError(message("decay", "a floating dtype", dtype_name(x.dtype), "Convert it."))
    _fits("decay", x, batch, "(*batch,)")
    if arrays.family(source) == "numpy" and bool(((source > 1) | (source <= 0)).any()):
        raise OptionError(
            message("decay", "values in (0, 1]", f"{source.min()} to {source.max()}", "Clip or rescale γ.")
        )
    return xp.log(arrays.cast(xp, x, dtype))[..., None, None], True


def _check_packing(
    xp: Namespace, options: Options, like: Array, batch: tuple[int, ...], length: int
) -> tuple[Array | None, Any]:
    """(starts (*b, T, 1), None) for segment_ids, (None, offsets) for cu_seqlens."""
    if options.segment_ids is not None:
        ids = _token_option(xp, "segment_ids", options.segment_ids, like, batch, length, arrays.INTEGER)
        source = options.segment_ids
        if arrays.family(source) == "numpy" and source.ndim and bool((source[..., 1:] < source[..., :-1]).any()):
            raise OptionError(
                message("segment_ids", "non-decreasing ids along T", "a decreasing pair", "Sort the sequences.")
            )
        if length == 0:
            return xp.ones_like(ids, dtype=xp.bool)[..., None], None
        changed = ids[..., 1:] != ids[..., :-1]
        first = xp.ones_like(ids[..., :1], dtype=xp.bool)
        return xp.concat([first, changed], axis=-1)[..., None], None
    if options.cu_seqlens is None:
        return None, None
    return None, check_offsets(options.cu_seqlens, length)


def check_offsets(offsets: Any, length: int) -> Any:
    """cu_seqlens as a list where its values are known, else the traced array itself."""
    if not arrays.is_array(offsets):
        raise DTypeError(
            message("cu_seqlens", "an integer array (N + 1,)", _describe(offsets), "Pass an integer array.")
        )
    arrays.namespace(offsets, "cu_seqlens")
    if dtype_name(offsets.dtype) not in arrays.INTEGER:
        raise DTypeError(message("cu_seqlens", "an integer dtype", dtype_name(offsets.dtype), "Convert it to int64."))
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ShapeError(
            message("cu_seqlens", "shape (N + 1,)", f"shape {tuple(offsets.shape)}", "Pass cumulative lengths.")
        )
    values = arrays.host_integers(offsets)
    if values is None:
        return offsets
    if values[0] != 0 or values[-1] != length:
        got = f"{values[0]} … {values[-1]}"
        raise OptionError(message("cu_seqlens", f"offsets from 0 to T = {length}", got, "Start at 0 and end at T."))
    if any(b < a for a, b in pairwise(values)):
        raise OptionError(message("cu_seqlens", "non-decreasing offsets", f"{values}", "Pass cumulative lengths."))
    return values


def _check_bidirectional(options: Options, log_decay: Array | None) -> None:
    def refuse(name: str, got: str) -> OptionError:
        return OptionError(message(name, 'none of it with mask="none"', got, 'Use mask="causal", or drop it.'))

    if log_decay is not None:
        raise refuse("decay" if options.decay is not None else "log_decay", "a decay")
    if options.initial_state is not None:
        raise refuse("initial_state", "a state")
    if options.return_state:
        raise refuse("return_state", "True")
    if options.form in ("recurrent", "scan"):
        raise refuse("form", repr(options.form))


def check_state(
    state: Any, spec: Spec, like: Array, batch: tuple[int, ...], q: Array, v: Array, dtype: Any, cu_seqlens: Any = None
) -> States:
    """The arrays of a state by symbol; errors when it belongs to another operator, options, sizes, library or dtype."""
    from hla.states import describe_spec, is_state, to_arrays

    if not is_state(state):
        raise DTypeError(
            message(
                "initial_state", "a state of this library", type(state).__name__, "Use return_state=True or init_state."
            )
        )
    if state.spec != spec:
        raise OptionError(
            message("initial_state", f"a state of {describe_spec(spec)}", f"one of {describe_spec(state.spec)}",
                    "A state serves only the operator and options that made it.")
        )  # fmt: skip
    wanted = batch if cu_seqlens is None else (len(cu_seqlens) - 1, *batch)
    result = to_arrays(state)
    shape_of = {"q": int(q.shape[-1]), "k": int(q.shape[-1]), "v": int(v.shape[-1]), "one": 1}
    from hla.family import shapes

    sizes = shapes(program(spec), (), (), (), shape_of["q"], shape_of["v"]).state
    for symbol, x in result.items():
        name = f"initial_state.{state.field_of(symbol)}"
        arrays.namespace(x, name)
        arrays.same_library_and_device(like, "v", **{name: x})
        found = dtype_name(x.dtype)
        if found not in ("float32", "float64"):
            raise DTypeError(message(name, "float32 or float64", found, "States are never stored in 16 bits."))
        if found == "float64" and dtype_name(dtype) == "float32":
            raise DTypeError(
                message(
                    name, "float32, as q, k, v accumulate in it", found, "Convert the inputs to float64, or the state."
                )
            )
        if x.ndim < 2 or tuple(x.shape[-2:]) != sizes[symbol]:
            raise ShapeError(
                message(
                    name,
                    f"last axes {sizes[symbol]} for d = {q.shape[-1]}, dv = {v.shape[-1]}",
                    f"shape {tuple(x.shape)}",
                    "Use a state made for these sizes.",
                )
            )
        _fits(name, x, (*wanted, *sizes[symbol]), "(N, *batch, …)" if cu_seqlens is not None else "(*batch, …)")
        if cu_seqlens is not None and (x.ndim != len(wanted) + 2 or x.shape[0] != wanted[0]):
            raise ShapeError(
                message(
                    name,
                    f"a leading axis of N = {wanted[0]} sequences before the batch axes",
                    f"shape {tuple(x.shape)}",
                    "With cu_seqlens pass one state per sequence.",
                )
            )
    return result


def check_batches(batch: tuple[int, ...], kv_batch: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch axes as given to `init_state`: (batch, kv_batch), kv_batch broadcasting to batch."""

    def axes(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (tuple, list)) or not all(arrays.is_integer(n) and n >= 0 for n in value):
            raise OptionError(message(name, "a tuple of sizes ≥ 0", repr(value), "Pass e.g. (B, H)."))
        return tuple(int(n) for n in value)

    batch = axes("batch", batch)
    if kv_batch is None:
        return batch, batch
    kv_batch = axes("kv_batch", kv_batch)
    try:
        fits = broadcast_shapes(kv_batch, batch) == batch
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            message("kv_batch", f"axes that broadcast to batch = {batch}", f"{kv_batch}", "Use size-1 axes.")
        )
    return batch, kv_batch
