"""Every refusal: its class, what else it is, and a message that says argument, expected, got, what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import hla
from libraries import Library

TOKENS, HEADS, D, DV = 11, 3, 5, 7
NUMPY = Library("numpy")
OPERATORS: dict[str, Callable[..., Any]] = {
    "linear_attention": hla.linear_attention,
    "hla2": hla.hla2,
    "ahla": hla.ahla,
    "hla3": hla.hla3,
}

MESSAGE = re.compile(
    r"(?P<argument>[^:]+): expected (?P<expected>.+?), got (?P<got>.+)\. (?P<todo>[^.].*[.?!)])", re.DOTALL
)


def test_what_each_error_is() -> None:
    """Under their own names and as the built-in kind that other code catches."""
    for name, base in {
        "ShapeError": ValueError,
        "DTypeError": TypeError,
        "OptionError": ValueError,
        "MixedArrayError": TypeError,
        "UnknownBackendError": ValueError,
        "BackendNotInstalledError": ImportError,
        "BackendUnsupportedError": NotImplementedError,
    }.items():
        error = getattr(hla, name)
        assert error.__bases__ == (base,)
        assert error.__name__ == name
        assert error is getattr(hla.errors, name)
        assert inspect.getdoc(error)


class Row(NamedTuple):
    """A refusal: what is called, and what is said."""

    call: Callable[[], Any]
    error: type[Exception]
    argument: str
    expected: str
    got: str


def x(*shape: int, dtype: Any = np.float64) -> Any:
    """An array that no check of values minds."""
    return np.full(shape, 0.5, dtype=dtype)


def attend(**changed: Any) -> Callable[[], Any]:
    """hla2 on good inputs but for what is changed."""

    def call() -> Any:
        given = {"q": x(HEADS, TOKENS, D), "k": x(HEADS, TOKENS, D), "v": x(HEADS, TOKENS, DV), **changed}
        operator, order = given.pop("operator", "hla2"), given.pop("order", None)
        q, k, v = (given.pop(name) for name in "qkv")
        if order is not None:
            return hla.higher_order(q, k, v, order=order, **given)
        return OPERATORS[operator](q, k, v, **given)

    return call


def state(operator: str = "hla2", batch: tuple[int, ...] = (HEADS,), like: Any = None, **options: Any) -> Any:
    given = {"d": D, "dv": DV, **options}
    return hla.init_state(operator, batch=batch, like=x(1) if like is None else like, **given)


def start(**changed: Any) -> Callable[[], Any]:
    def call() -> Any:
        given = {"operator": "hla2", "batch": (HEADS,), "d": D, "dv": DV, "like": x(1), **changed}
        return hla.init_state(given.pop("operator"), **given)

    return call


def step(made: Any = None, **changed: Any) -> Callable[[], Any]:
    def call() -> Any:
        given = {"q": x(HEADS, D), "k": x(HEADS, D), "v": x(HEADS, DV), **changed}
        q, k, v = (given.pop(name) for name in "qkv")
        return hla.step(state() if made is None else made, q, k, v, **given)

    return call


SHAPE, KIND, OPTION = hla.ShapeError, hla.DTypeError, hla.OptionError
ROWS: dict[str, Row] = {}


def refuse(name: str, call: Callable[[], Any], error: type[Exception], argument: str, expected: str, got: str) -> None:
    assert name not in ROWS
    ROWS[name] = Row(call, error, argument, expected, got)


# --- inputs that are no floating arrays ------------------------------------------------------------------------------

for argument in "qkv":
    given = x(HEADS, TOKENS, DV if argument == "v" else D)
    for dtype in ("int8", "int32", "int64", "uint8", "bool", "complex64", "complex128", "object"):
        refuse(
            f"{argument} {dtype}", attend(**{argument: given.astype(dtype)}), KIND, argument, "floating dtype", dtype
        )
    for name, value, got in (
        ("list", given.tolist(), "builtins.list"),
        ("tuple", tuple(given), "builtins.tuple"),
        ("number", 0.5, "builtins.float"),
        ("none", None, "builtins.NoneType"),
        ("text", "x", "builtins.str"),
        ("masked", np.ma.masked_array(given, mask=False), "numpy.ma.MaskedArray"),
    ):
        refuse(f"{argument} {name}", attend(**{argument: value}), KIND, argument, "array", got)
    matrix = np.ones((TOKENS, D)).view(np.matrix)
    refuse(f"{argument} matrix", attend(**{argument: matrix}), KIND, argument, "a plain array", "matrix")
refuse("q datetime", attend(q=np.zeros((TOKENS, D), "datetime64[s]")), KIND, "q", "floating dtype", "datetime64")
refuse("q text array", attend(q=np.full((TOKENS, D), "a")), KIND, "q", "floating dtype", "str")

# --- shapes ----------------------------------------------------------------------------------------------------------

refuse("d of k", attend(k=x(HEADS, TOKENS, 4)), SHAPE, "k", "feature size of q, d = 5", "d = 4")
refuse("d 1 does not broadcast", attend(k=x(HEADS, TOKENS, 1)), SHAPE, "k", "feature size of q, d = 5", "d = 1")
refuse("T of k", attend(k=x(HEADS, 10, D)), SHAPE, "k", "T = 11", "T = 10")
refuse("T 1 does not broadcast", attend(k=x(HEADS, 1, D)), SHAPE, "k", "T = 11", "T = 1")
refuse("T of v", attend(v=x(HEADS, 12, DV)), SHAPE, "v", "T = 11", "T = 12")
refuse("heads of k", attend(k=x(2, TOKENS, D)), SHAPE, "q, k, v", "batch axes that broadcast", "k (2,)")
refuse("heads of v", attend(v=x(4, TOKENS, DV)), SHAPE, "q, k, v", "batch axes that broadcast", "v (4,)")
refuse("one axis", attend(q=x(D)), SHAPE, "q", "at least 2 axes", "(5,)")
refuse("no axis", attend(v=np.asarray(0.5)), SHAPE, "v", "at least 2 axes", "()")
refuse("no features", attend(q=x(TOKENS, 0), k=x(TOKENS, 0)), SHAPE, "q and v", "at least one feature", "d = 0")
refuse("no values", attend(v=x(HEADS, TOKENS, 0)), SHAPE, "q and v", "at least one feature", "dv = 0")
refuse(
    "T on another axis", attend(q=x(HEADS, TOKENS, D), k=x(TOKENS, HEADS, D), axis=-3), SHAPE, "k", "T = 3", "T = 11"
)

# --- decay -----------------------------------------------------------------------------------------------------------

for value in (1.5, 0, 0.0, -0.5, float("inf"), float("nan"), True, 2):
    refuse(f"decay {value!r}", attend(decay=value), OPTION, "decay", "a number in (0, 1]", repr(value))
refuse("decay np.float64", attend(decay=np.float64(1.5)), OPTION, "decay", "a number in (0, 1]", "1.5")
refuse("decay above 1", attend(decay=np.asarray([0.5, 1.0, 1.1])), OPTION, "decay", "values in (0, 1]", "1.1")
refuse("decay of 0", attend(decay=np.asarray([0.5, 0.0, 1.0])), OPTION, "decay", "values in (0, 1]", "0.0")
refuse("decay per token", attend(decay=x(HEADS, TOKENS)), SHAPE, "decay", "(*batch,) = (3,)", "(3, 11)")
refuse("decay of other heads", attend(decay=x(2)), SHAPE, "decay", "(*batch,) = (3,)", "(2,)")
refuse("decay of more axes", attend(decay=x(2, HEADS)), SHAPE, "decay", "(*batch,) = (3,)", "(2, 3)")
refuse("decay int", attend(decay=np.ones(HEADS, int)), KIND, "decay", "floating dtype", "int64")
refuse("decay bool", attend(decay=np.ones(HEADS, bool)), KIND, "decay", "floating dtype", "bool")
refuse("decay complex", attend(decay=0.5 + 0j), KIND, "decay", "a number or a floating array", "(0.5+0j)")
refuse("decay list", attend(decay=[0.5, 0.5, 0.5]), KIND, "decay", "a number or a floating array", "[0.5, 0.5, 0.5]")
refuse("decay text", attend(decay="0.5"), KIND, "decay", "a number or a floating array", "'0.5'")
refuse("decay masked", attend(decay=np.ma.masked_array([0.5] * 3)), KIND, "decay", "array", "MaskedArray")
refuse("both decays", attend(decay=0.5, log_decay=-x(TOKENS)), OPTION, "decay", "decay or log_decay", "both")
refuse("log_decay above 0", attend(log_decay=x(TOKENS)), OPTION, "log_decay", "values ≤ 0", "0.5")
refuse("log_decay of +inf", attend(log_decay=np.full(TOKENS, np.inf)), OPTION, "log_decay", "values ≤ 0", "inf")
refuse("log_decay number", attend(log_decay=-0.5), KIND, "log_decay", "array", "builtins.float")
refuse("log_decay list", attend(log_decay=[-0.5] * TOKENS), KIND, "log_decay", "array", "builtins.list")
refuse("log_decay int", attend(log_decay=np.zeros(TOKENS, int)), KIND, "log_decay", "dtype", "int64")
refuse("log_decay of other T", attend(log_decay=-x(10)), SHAPE, "log_decay", "(*batch, T) = (3, 11)", "(10,)")
refuse("log_decay of heads only", attend(log_decay=-x(HEADS)), SHAPE, "log_decay", "(*batch, T) = (3, 11)", "(3,)")
refuse("log_decay of features", attend(log_decay=-x(HEADS, TOKENS, 1)), SHAPE, "log_decay", "(3, 11)", "(3, 11, 1)")

# --- plain options ---------------------------------------------------------------------------------------------------

for value in ("1", None, True, 1j, [1.0]):
    refuse(f"scale {value!r}", attend(scale=value), OPTION, "scale", "a number or a floating array", repr(value))
refuse("scale per head", attend(scale=x(HEADS)), OPTION, "scale", "array without axes", "float64 array of shape (3,)")
refuse("scale int array", attend(scale=np.asarray(2)), OPTION, "scale", "floating array", "int64 array of shape ()")
for value in (1, 0, None, "yes", np.True_):
    refuse(f"normalize {value!r}", attend(normalize=value), OPTION, "normalize", "True or False", repr(value))
    refuse(f"return_state {value!r}", attend(return_state=value), OPTION, "return_state", "True or False", repr(value))
for value in (-1e-6, float("nan"), "0", None, True, x(1)):
    refuse(f"eps {value!r}", attend(eps=value), OPTION, "eps", "a number ≥ 0", repr(value))
for value in (float("nan"), float("inf"), "0", None, True):
    refuse(f"ridge {value!r}", attend(ridge=value), OPTION, "ridge", "a finite number", repr(value))
for operator in ("linear_attention", "ahla", "hla3"):
    refuse(f"ridge {operator}", attend(operator=operator, ridge=0.1), OPTION, "ridge", f"0 for {operator}", "0.1")
refuse("ridge order 4", attend(order=4, ridge=0.1), OPTION, "ridge", "0 for higher_order", "0.1")
for value in ("casual", "Causal", None, True, ["causal"]):
    refuse(f"mask {value!r}", attend(mask=value), OPTION, "mask", "one of causal, prefix, none", repr(value))
for value in ("printed", "as-printed", None):
    refuse(
        f"definition {value!r}", attend(definition=value), OPTION, "definition", "one of exact, as_printed", repr(value)
    )
for operator in ("linear_attention", "ahla"):
    call = attend(operator=operator, definition="as_printed")
    refuse(f"as_printed {operator}", call, OPTION, "definition", f'"exact" for {operator}', '"as_printed"')
refuse("as_printed order 4", attend(order=4, definition="as_printed"), OPTION, "definition", '"exact"', '"as_printed"')
for value in ("prefix", "none"):
    call = attend(definition="as_printed", mask=value)
    refuse(f"as_printed {value}", call, OPTION, "mask", '"causal" with definition="as_printed"', repr(value))
refuse("prefix order 4", attend(order=4, mask="prefix"), OPTION, "mask", '"causal" or "none"', '"prefix"')
for value in (0, -1, 1.5, 2.0, True, "2", float("nan")):
    refuse(f"order {value!r}", attend(order=value), OPTION, "order", "an integer ≥ 1", repr(value))
for value in (0, -3, 1.5, 64.0, True, "64", float("inf")):
    refuse(
        f"chunk_size {value!r}", attend(chunk_size=value), OPTION, "chunk_size", "an integer ≥ 1 or None", repr(value)
    )
for value in ("chunk", "Recurrent", "", None, 1):
    refuse(f"form {value!r}", attend(form=value), OPTION, "form", "one of auto, recurrent, scan", repr(value))
for value in (1.0, True, None, "time", (1,)):
    refuse(f"axis {value!r}", attend(axis=value), OPTION, "axis", "an integer", repr(value))
for value in (-1, 2, 3, -4):
    refuse(f"axis {value!r}", attend(axis=value), OPTION, "axis", "an axis from -3 to -2", "")
refuse("axis of ranks", attend(k=x(TOKENS, D), axis=1), OPTION, "axis", "a negative axis", "1")

# --- mask="none" -----------------------------------------------------------------------------------------------------

for name, options, got in (
    ("decay", {"decay": 0.5}, "a decay"),
    ("log_decay", {"log_decay": -x(TOKENS)}, "a decay"),
    ("initial_state", {"initial_state": state()}, ""),
    ("return_state", {"return_state": True}, "True"),
    ("form", {"form": "recurrent"}, "'recurrent'"),
    ("form scan", {"form": "scan"}, "'scan'"),
):
    refuse(f"none {name}", attend(mask="none", **options), OPTION, name.partition(" ")[0], 'mask="none"', got)

# --- which tokens ----------------------------------------------------------------------------------------------------

for name, value in (("int", np.ones(TOKENS, int)), ("float", x(TOKENS))):
    refuse(f"token_mask {name}", attend(token_mask=value), KIND, "token_mask", "dtype bool", value.dtype.name)
refuse("token_mask list", attend(token_mask=[True] * TOKENS), KIND, "token_mask", "array", "builtins.list")
refuse("token_mask True", attend(token_mask=True), KIND, "token_mask", "array", "builtins.bool")
refuse("token_mask short", attend(token_mask=np.ones(10, bool)), SHAPE, "token_mask", "(*batch, T) = (3, 11)", "(10,)")
refuse(
    "token_mask features", attend(token_mask=np.ones((HEADS, TOKENS, 1), bool)), SHAPE, "token_mask", "(3, 11)", "1)"
)
refuse("segment_ids float", attend(segment_ids=x(TOKENS)), KIND, "segment_ids", "dtype", "float64")
refuse("segment_ids bool", attend(segment_ids=np.ones(TOKENS, bool)), KIND, "segment_ids", "dtype", "bool")
refuse("segment_ids list", attend(segment_ids=[0] * TOKENS), KIND, "segment_ids", "array", "builtins.list")
refuse(
    "segment_ids short", attend(segment_ids=np.zeros(10, int)), SHAPE, "segment_ids", "(*batch, T) = (3, 11)", "(10,)"
)
ids = np.asarray([0] * 5 + [1] * 5 + [0])
refuse("segment_ids decrease", attend(segment_ids=ids), OPTION, "segment_ids", "non-decreasing", "decreasing")
refuse(
    "segment_ids state", attend(segment_ids=ids * 0, initial_state=state()), OPTION, "segment_ids", "state", "a state"
)
refuse("segment_ids return", attend(segment_ids=ids * 0, return_state=True), OPTION, "segment_ids", "state", "a state")
both = attend(segment_ids=ids * 0, cu_seqlens=np.asarray([0, TOKENS]))
refuse("both packings", both, OPTION, "segment_ids", "segment_ids or cu_seqlens", "both")
refuse("cu_seqlens list", attend(cu_seqlens=[0, TOKENS]), KIND, "cu_seqlens", "an integer array", "[0, 11]")
refuse(
    "cu_seqlens float", attend(cu_seqlens=np.asarray([0.0, 11.0])), KIND, "cu_seqlens", "an integer dtype", "float64"
)
refuse("cu_seqlens 2-D", attend(cu_seqlens=np.asarray([[0, 11]])), SHAPE, "cu_seqlens", "shape (N + 1,)", "(1, 2)")
refuse("cu_seqlens 0-D", attend(cu_seqlens=np.asarray(11)), SHAPE, "cu_seqlens", "shape (N + 1,)", "()")
refuse("cu_seqlens nothing", attend(cu_seqlens=np.zeros(0, int)), SHAPE, "cu_seqlens", "shape (N + 1,)", "(0,)")
for values in ([1, 11], [0, 10], [0, 12], [-1, 11], [0]):
    call = attend(cu_seqlens=np.asarray(values))
    refuse(
        f"cu_seqlens {values}", call, OPTION, "cu_seqlens", "offsets from 0 to T = 11", f"{values[0]} … {values[-1]}"
    )
for values in ([0, 5, 4, 11], [0, 12, 11], [0, -1, 11]):
    call = attend(cu_seqlens=np.asarray(values))
    refuse(f"cu_seqlens {values}", call, OPTION, "cu_seqlens", "non-decreasing offsets", str(values))

# --- states ----------------------------------------------------------------------------------------------------------

for name, value in (("tuple", tuple(state())), ("array", x(D, DV)), ("dict", state()._asdict()), ("text", "hla2")):
    refuse(f"state {name}", attend(initial_state=value), KIND, "initial_state", "a state", type(value).__name__)
refuse("state of ahla", attend(initial_state=state("ahla")), OPTION, "initial_state", "a state of hla2", "one of ahla")
refuse(
    "state normalize", attend(initial_state=state(), normalize=True), OPTION, "initial_state", "normalize=True", "False"
)
refuse("state ridge", attend(initial_state=state(), ridge=0.1), OPTION, "initial_state", "a ridge", "no ridge")
refuse("state d", attend(initial_state=state(d=4)), SHAPE, "initial_state.key_moment", "(5, 5)", "(3, 4, 4)")
refuse("state dv", attend(initial_state=state(dv=4)), SHAPE, "initial_state.corrected_state", "(5, 7)", "(3, 5, 4)")
refuse(
    "state heads", attend(initial_state=state(batch=(2,))), SHAPE, "initial_state.key_moment", "(3, 5, 5)", "(2, 5, 5)"
)
half = type(state())(*(y.astype(np.float16) for y in state()))
refuse("state float16", attend(initial_state=half), KIND, "initial_state.key_moment", "float32 or float64", "float16")
ints = type(state())(*(y.astype(int) for y in state()))
refuse("state int", attend(initial_state=ints), KIND, "initial_state.key_moment", "float32 or float64", "int64")
lists = type(state())(*(y.tolist() for y in state()))
refuse("state of lists", attend(initial_state=lists), KIND, "initial_state.key_moment", "array", "builtins.list")
narrow = {name: x(HEADS, TOKENS, size, dtype=np.float32) for name, size in (("q", D), ("k", D), ("v", DV))}
refuse("state float64", attend(**narrow, initial_state=state()), KIND, "initial_state.key_moment", "float32", "float64")
offsets = np.asarray([0, 4, TOKENS])
call = attend(cu_seqlens=offsets, initial_state=state())
refuse("state without N", call, SHAPE, "initial_state.key_moment", "N", "(3, 5, 5)")
call = attend(cu_seqlens=offsets, initial_state=state(batch=(3, HEADS)))
refuse("state of other N", call, SHAPE, "initial_state.key_moment", "(2, 3, 5, 5)", "(3, 3, 5, 5)")

# --- init_state ------------------------------------------------------------------------------------------------------

refuse("init operator", start(operator="hla4"), OPTION, "operator", "one of linear_attention, hla2", "'hla4'")
refuse("init operator order", start(operator="higher_order"), OPTION, "order", "an integer ≥ 1", "None")
refuse("init order of hla2", start(order=3), OPTION, "order", "2 for hla2", "3")
refuse("init none", start(mask="none"), OPTION, "mask", '"causal" or "prefix"', '"none"')
refuse("init normalize", start(normalize=1), OPTION, "normalize", "True or False", "1")
refuse("init ridge", start(operator="ahla", ridge=0.1), OPTION, "ridge", "0 for ahla", "0.1")
for name in ("d", "dv"):
    for value in (0, -1, 2.0, True, "5", None):
        refuse(f"init {name} {value!r}", start(**{name: value}), OPTION, name, "an integer ≥ 1", repr(value))
for value in (3, None, ("a",), 2.0):
    refuse(f"init batch {value!r}", start(batch=value), OPTION, "batch", "a tuple of sizes", repr(value))
for value in ((-1,), (3, -2)):
    refuse(f"init batch {value!r}", start(batch=value), OPTION, "batch", "sizes ≥ 0", repr(value))
for value in ((2,), (1, 1), (3, 3)):
    refuse(f"init kv_batch {value!r}", start(kv_batch=value), SHAPE, "kv_batch", "batch = (3,)", str(value))
refuse("init like int", start(like=np.zeros(1, int)), KIND, "like", "floating array", "int64")
refuse("init like list", start(like=[1.0]), KIND, "like", "array", "builtins.list")

# --- step ------------------------------------------------------------------------------------------------------------

for name, value in (("none", None), ("tuple", (x(5, 5), x(5, 7))), ("array", x(5, 7))):
    call = partial(hla.step, value, x(D), x(D), x(DV))
    refuse(f"step state {name}", call, KIND, "state", "a state", type(value).__name__)
refuse("step q list", step(q=[0.5] * D), KIND, "q", "array", "builtins.list")
refuse("step k int", step(k=np.ones((HEADS, D), int)), KIND, "k", "floating dtype", "int64")
refuse("step v 0-D", step(v=np.asarray(0.5)), SHAPE, "v", "at least 1 axes", "()")
refuse("step d", step(q=x(HEADS, 4), k=x(HEADS, 4)), SHAPE, "initial_state.key_moment", "(4, 4)", "(3, 5, 5)")
refuse(
    "step heads", step(q=x(2, D), k=x(2, D), v=x(2, DV)), SHAPE, "initial_state.key_moment", "(2, 5, 5)", "(3, 5, 5)"
)
refuse("step decay", step(decay=1.5), OPTION, "decay", "a number in (0, 1]", "1.5")
refuse("step log_decay", step(log_decay=x(HEADS)), OPTION, "log_decay", "values ≤ 0", "0.5")
refuse("step log_decay shape", step(log_decay=-x(2)), SHAPE, "log_decay", "(3, 1)", "(2, 1)")
refuse("step log_decay number", step(log_decay=-0.5), KIND, "log_decay", "array", "builtins.float")
refuse("step token_mask", step(token_mask=x(HEADS)), KIND, "token_mask", "dtype bool", "float64")
refuse("step normalize", step(normalize=True), OPTION, "initial_state", "normalize=True", "normalize=False")
refuse("step order", step(order=3), OPTION, "order", "2, as the state is of hla2", "3")
refuse("step none", step(mask="none"), OPTION, "initial_state", 'mask="none"', "a state")

# --- the rest --------------------------------------------------------------------------------------------------------

good = {"q": x(TOKENS, D), "k": x(TOKENS, D), "v": x(TOKENS, DV)}
for function in (hla.explain, hla.vjp, hla.segments.from_tokens):
    for value in ("hla4", "HLA2", "linear attention"):
        call = partial(function, value, **good)
        refuse(f"{function.__name__} {value}", call, OPTION, "operator", "one of linear_attention, hla2", repr(value))
    call = partial(function, "hla2", **good, order=3)
    refuse(f"{function.__name__} order", call, OPTION, "order", "2 for hla2", "3")
    call = partial(function, "higher_order", **good)
    refuse(f"{function.__name__} no order", call, OPTION, "order", "an integer ≥ 1", "None")
for value in ("Relu", "elu", None, 1):
    call = partial(hla.feature_map, x(D), value)
    refuse(f"feature_map {value!r}", call, OPTION, "name", "one of identity, elu+1, relu, softmax", repr(value))
for dtype in ("int64", "bool", "complex128", "object"):
    call = partial(hla.feature_map, np.ones(D, dtype), "relu")
    refuse(f"feature_map {dtype}", call, KIND, "x", "a floating dtype", dtype)
refuse("feature_map list", lambda: hla.feature_map([1.0], "relu"), KIND, "x", "array", "builtins.list")
refuse("feature_map 0-D", lambda: hla.feature_map(np.asarray(1.0), "softmax"), SHAPE, "x", "axis", "()")
sizes = {"T": 8, "d": 4, "dv": 4}
for name, value, expected in (
    *((name, value, "an integer ≥ 1") for name in ("d", "dv", "heads") for value in (0, -1, 1.5, True, "4")),
    *(("T", value, "an integer ≥ 0") for value in (-1, 1.5, True, None)),
    *(("chunk_size", value, "an integer ≥ 1 or None") for value in (0, -1, 1.5, True)),
    ("form", "chunk", "one of auto, recurrent, scan, chunkwise, parallel"),
    ("dtype", "int8", "one of float16, bfloat16, float32, float64"),
    ("dtype", None, "one of float16"),
    ("mask", "causl", "one of causal, prefix, none"),
    ("order", 2.5, "2 for hla2"),
):
    call = partial(hla.cost, "hla2", **{**sizes, name: value})
    refuse(f"cost {name} {value!r}", call, OPTION, name, expected, repr(value))
refuse("cost operator", lambda: hla.cost("softmax", **sizes), OPTION, "operator", "one of", "'softmax'")


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    row = ROWS[name]
    with pytest.raises(row.error) as found:
        row.call()
    assert type(found.value) is row.error
    message = str(found.value)
    parts = MESSAGE.fullmatch(message)
    assert parts is not None, f"not in four parts: {message}"
    assert parts["argument"] == row.argument, message
    assert row.expected in parts["expected"], message
    assert row.got in parts["got"], message
    assert "\n" not in message or "\n" in row.got


def is_operator_call(row: Row) -> bool:
    return getattr(row.call, "__qualname__", "").startswith(attend.__name__ + ".")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if is_operator_call(row)])
def test_refused_before_anything_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is even chosen."""

    def choose(*_: Any) -> None:
        raise AssertionError("a backend was chosen")

    monkeypatch.setattr(hla.backends.selection, "resolve", choose)
    with pytest.raises(ROWS[name].error):
        ROWS[name].call()


# --- on every library ------------------------------------------------------------------------------------------------


def inputs(lib: Library) -> list[Any]:
    return [lib.asarray(x(HEADS, TOKENS, size)) for size in (D, D, DV)]


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "complex64"])
def test_dtypes_of_every_library(lib: Library, dtype: str) -> None:
    for i, name in enumerate("qkv"):
        given = inputs(lib)
        given[i] = lib.asarray(np.ones(given[i].shape, dtype))
        with pytest.raises(hla.DTypeError, match=rf"^{name}: expected a floating dtype .*, got {dtype}\. "):
            hla.hla2(*given)


def test_shapes_of_every_library(lib: Library) -> None:
    q, k, v = inputs(lib)
    with pytest.raises(hla.ShapeError, match=r"^k: expected T = 11 .*, got T = 10\. "):
        hla.hla2(q, k[:, 1:, :], v)
    with pytest.raises(hla.ShapeError, match=r"^k: expected the feature size of q, d = 5, got d = 4\. "):
        hla.hla2(q, k[:, :, 1:], v)
    with pytest.raises(hla.ShapeError, match=r"^q, k, v: expected batch axes that broadcast, got .*\. "):
        hla.hla2(q, k, v[1:, :, :])
    with pytest.raises(hla.ShapeError, match=r"^decay: expected .*, got shape \(2,\)\. "):
        hla.hla2(q, k, v, decay=lib.asarray(x(2)))


class Foreign:
    """An array of a library that nobody has heard of, for the session that has NumPy alone."""

    def __init__(self, values: Any) -> None:
        self.shape, self.ndim, self.dtype = values.shape, values.ndim, values.dtype
        self.device = "somewhere"

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return type(self)

    def __getitem__(self, key: Any) -> Foreign:
        return Foreign(np.empty(self.shape)[key])


@pytest.mark.parametrize("i", [0, 1, 2])
def test_two_libraries(lib: Library, i: int) -> None:
    given = inputs(lib)
    other = Foreign if lib.name == "numpy" else NUMPY.asarray
    given[i] = other(x(*given[i].shape))
    name = "k" if i == 0 else "qkv"[i]
    foreign = "Foreign" if lib.name == "numpy" else "numpy"
    ours, theirs = (foreign, lib.family) if i == 0 else (lib.family, foreign)
    words = rf"^{name}: expected an array of the same library as q \({ours}\), got {theirs}\. Convert one of them"
    for call in (
        lambda: hla.hla2(*given),
        lambda: hla.vjp("hla2", *given),
        lambda: hla.explain("hla2", *given),
        lambda: hla.segments.from_tokens("hla2", *given),
    ):
        with pytest.raises(hla.MixedArrayError, match=words):
            call()
    start = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=given[i - 1])
    with pytest.raises(hla.MixedArrayError, match=rf"^{name}: expected an array of the same library as q"):
        hla.step(start, *(y[:, 0, :] for y in given))


def test_a_state_wider_than_the_call(lib: Library) -> None:
    """float64 fields where q, k, v accumulate in float32 would be rounded: refused. The other way round is exact."""
    narrow = [lib.asarray(x(HEADS, TOKENS, size), "float32") for size in (D, D, DV)]
    wide = state(like=inputs(lib)[0])
    words = r"^initial_state\.key_moment: expected float32, as q, k, v accumulate in it, got float64\. "
    with pytest.raises(hla.DTypeError, match=words):
        hla.hla2(*narrow, initial_state=wide)
    with pytest.raises(hla.DTypeError, match=words):
        hla.step(wide, *(y[:, 0, :] for y in narrow))
    o, returned = hla.hla2(*inputs(lib), initial_state=state(like=narrow[0]), return_state=True)
    assert o.dtype == returned.key_moment.dtype == lib.dtype("float64")


def test_a_state_of_another_library(lib: Library) -> None:
    if lib.name == "numpy":
        pytest.skip("needs a second library")
    with pytest.raises(hla.MixedArrayError, match=r"^initial_state\.key_moment: expected an array of the same library"):
        hla.hla2(*inputs(lib), initial_state=state())


@pytest.mark.parametrize("option", ["decay", "log_decay", "token_mask", "segment_ids", "cu_seqlens", "scale"])
def test_numpy_option_arrays_are_host_data_for_every_library(lib: Library, option: str) -> None:
    """Options may be NumPy arrays whatever the inputs are; they are checked by value, and mean the same."""
    value = {
        "decay": x(HEADS),
        "log_decay": -x(TOKENS),
        "token_mask": np.arange(TOKENS) % 3 > 0,
        "segment_ids": np.arange(TOKENS) // 4,
        "cu_seqlens": np.asarray([0, 4, TOKENS]),
        "scale": np.asarray(0.37),
    }[option]
    got = hla.hla2(*inputs(lib), **{option: value})
    expected = hla.hla2(*inputs(NUMPY), **{option: value})
    np.testing.assert_allclose(lib.numpy(got), expected, rtol=1e-12)


def test_option_arrays_of_a_foreign_library(lib: Library) -> None:
    """An array of the library for NumPy inputs is refused: only NumPy is host data."""
    if lib.name == "numpy":
        pytest.skip("needs a second library")
    for name, value in (("decay", x(HEADS)), ("log_decay", -x(TOKENS)), ("token_mask", np.ones(TOKENS, bool))):
        with pytest.raises(
            hla.MixedArrayError, match=rf"^{name}: expected an array of the same library as v \(numpy\)"
        ):
            hla.hla2(*inputs(NUMPY), **{name: lib.asarray(value)})


def test_two_devices(lib: Library) -> None:
    if lib.name != "strict":
        pytest.skip("needs a second device")
    other = Library("strict", {"CPU_DEVICE": "device1", "device1": "CPU_DEVICE"}[str(lib.device)])
    for i, name in ((1, "k"), (2, "v")):
        given = inputs(lib)
        given[i] = inputs(other)[i]
        with pytest.raises(
            hla.MixedArrayError, match=rf"^{name}: expected an array on the device of q \(.*\), got .*\. "
        ):
            hla.hla2(*given)
    for option, value in (("decay", x(HEADS)), ("log_decay", -x(TOKENS)), ("scale", x(1))):
        value = other.asarray(value)
        with pytest.raises(hla.MixedArrayError, match=rf"^{option}: expected an array on the device of v"):
            hla.hla2(*inputs(lib), **{option: value if option != "scale" else value[0]})
    start = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=inputs(other)[0])
    with pytest.raises(hla.MixedArrayError, match=r"^initial_state\.key_moment: expected an array on the device of v"):
        hla.hla2(*inputs(lib), initial_state=start)


def test_offsets_may_live_elsewhere(lib: Library) -> None:
    """`cu_seqlens` on the host or another device."""
    offsets = np.asarray([0, 4, TOKENS])
    placed = [offsets, lib.asarray(offsets)]
    if lib.name == "strict":
        placed += [Library("strict", "CPU_DEVICE").asarray(offsets), Library("strict", "device1").asarray(offsets)]
    expected = hla.hla2(*inputs(NUMPY), cu_seqlens=offsets)
    for where in placed:
        np.testing.assert_allclose(lib.numpy(hla.hla2(*inputs(lib), cu_seqlens=where)), expected, rtol=1e-12)


def test_device_arrays_are_not_read(lib: Library) -> None:
    """Values are checked where they are at hand for nothing; arrays of a framework are computed with as they stand."""
    call = {"decay": 1.5 * np.ones(HEADS)}
    if lib.name == "numpy":
        with pytest.raises(hla.OptionError):
            hla.hla2(*inputs(lib), **call)
        return
    got = hla.hla2(*inputs(lib), **{name: lib.asarray(value) for name, value in call.items()})
    assert np.isfinite(lib.numpy(got)).all()


def test_under_a_transformation(lib: Library) -> None:
    """Shapes and dtypes are checked under jit too; values that are traced are not."""
    if lib.name != "jax":
        pytest.skip("jax.jit: in the session of jax")
    import jax

    q, k, v = inputs(lib)
    with pytest.raises(hla.ShapeError, match=r"^k: expected T = 11"):
        jax.jit(hla.hla2)(q, k[:, 1:], v)
    with pytest.raises(hla.DTypeError, match=r"^v: expected a floating dtype .*, got int64"):
        jax.jit(hla.hla2)(q, k, v.astype(int))
    with pytest.raises(hla.OptionError, match=r"^decay: expected a number in \(0, 1\], got 1\.5"):
        jax.jit(lambda *x: hla.hla2(*x, decay=1.5))(q, k, v)
    got = jax.jit(lambda g, *x: hla.hla2(*x, decay=g))(jax.numpy.asarray(1.5), q, k, v)
    assert np.isfinite(lib.numpy(got)).all()


# --- unknown keywords ------------------------------------------------------------------------------------------------

KEYWORDS = [
    ("normalise", "normalize"),
    ("log_decays", "log_decay"),
    ("decays", "decay"),
    ("scales", "scale"),
    ("token_masks", "token_mask"),
    ("mode", None),
    ("gate", None),
]


@pytest.mark.parametrize(("given_name", "close"), KEYWORDS)
@pytest.mark.parametrize("function", [*OPERATORS, "higher_order", "explain", "vjp", "step", "from_tokens"])
def test_unknown_keyword(function: str, given_name: str, close: str | None) -> None:
    """A TypeError as of any function, with the close name, or else all of them."""
    q, k, v = x(TOKENS, D), x(TOKENS, D), x(TOKENS, DV)
    calls: dict[str, Callable[..., Any]] = {
        **{name: (lambda f=f, **options: f(q, k, v, **options)) for name, f in OPERATORS.items()},
        "higher_order": lambda **options: hla.higher_order(q, k, v, order=2, **options),
        "explain": lambda **options: hla.explain("hla2", q, k, v, **options),
        "vjp": lambda **options: hla.vjp("hla2", q, k, v, **options),
        "step": lambda **options: hla.step(state(batch=()), q[0], k[0], v[0], **options),
        "from_tokens": lambda **options: hla.segments.from_tokens("hla2", q, k, v, **options),
    }
    with pytest.raises(TypeError) as found:
        calls[function](**{given_name: None})
    assert type(found.value) is TypeError
    start = f"{function}() got an unexpected keyword argument {given_name!r}. "
    assert str(found.value).startswith(start)
    hint = str(found.value).removeprefix(start)
    if close is not None:
        assert hint == f"Did you mean {close!r}?"
    else:
        assert hint.startswith(("Known: ", "Did you mean "))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("step", ["segment_ids", "cu_seqlens", "initial_state", "return_state", "axis", "form", "chunk_size"]),
        ("from_tokens", ["eps", "segment_ids", "cu_seqlens", "initial_state", "return_state", "form", "backend"]),
        ("hla2", ["order", "inplace", "kv_batch"]),
        ("init_state", ["decay", "normalise", "dtype"]),
        ("identity", ["decay", "normalise"]),
        ("cost", ["decay", "normalise", "batch"]),
    ],
)
def test_keywords_of_other_functions(function: str, names: list[str]) -> None:
    """What is an option elsewhere and has no meaning here is unknown here."""
    q, k, v = x(TOKENS, D), x(TOKENS, D), x(TOKENS, DV)
    where = {"batch": (), "d": D, "dv": DV, "like": q}
    calls: dict[str, Callable[..., Any]] = {
        "step": lambda **options: hla.step(state(batch=()), q[0], k[0], v[0], **options),
        "from_tokens": lambda **options: hla.segments.from_tokens("hla2", q, k, v, **options),
        "hla2": lambda **options: hla.hla2(q, k, v, **options),
        "init_state": lambda **options: hla.init_state("hla2", **where, **options),
        "identity": lambda **options: hla.segments.identity("hla2", **where, **options),
        "cost": lambda **options: hla.cost("hla2", T=8, d=4, dv=4, **options),
    }
    for name in names:
        with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{name}'"):
            calls[function](**{name: None})


def test_missing_arguments() -> None:
    with pytest.raises(TypeError, match="order"):
        hla.higher_order(x(TOKENS, D), x(TOKENS, D), x(TOKENS, DV))
    with pytest.raises(TypeError, match="v"):
        hla.hla2(x(TOKENS, D), x(TOKENS, D))


# --- what is fine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
def test_odd_but_fine(operator: str) -> None:
    """Sizes and values at the edge of what is refused above."""
    run = OPERATORS[operator]
    assert run(x(0, D), x(0, D), x(0, DV)).shape == (0, DV)
    assert run(x(1, D), x(1, D), x(1, DV)).shape == (1, DV)
    assert run(x(0, TOKENS, D), x(TOKENS, D), x(TOKENS, DV)).shape == (0, TOKENS, DV)
    assert run(x(TOKENS, 1), x(TOKENS, 1), x(TOKENS, 1)).shape == (TOKENS, 1)
    q, k, v = x(TOKENS, D), x(TOKENS, D), x(TOKENS, DV)
    for options in (
        {"decay": 1},
        {"decay": 1.0},
        {"decay": np.float32(0.5)},
        {"decay": 1e-300},
        {"decay": x()},
        {"log_decay": np.zeros(TOKENS)},
        {"log_decay": np.full(TOKENS, -np.inf)},
        {"scale": 2},
        {"scale": np.float32(2)},
        {"eps": 0},
        {"chunk_size": np.int64(3)},
        {"chunk_size": 1000},
        {"axis": np.int64(-2)},
        {"axis": 0},
        {"cu_seqlens": np.asarray([0, 0, TOKENS, TOKENS], np.int32)},
        {"segment_ids": np.asarray(3)},
        {"token_mask": np.asarray(False)},
        {"initial_state": None},
        {"backend": "numpy"},
        {"backend": ["numpy"]},
        {"backend": ("numpy",)},
    ):
        assert run(q, k, v, **options).shape == (TOKENS, DV), options
