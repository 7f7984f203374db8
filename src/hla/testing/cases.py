"""What a backend is asked: one case per option, or pair of options, that has broken a library of this kind before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hla.arrays import Array
from hla.testing.inputs import (
    Inputs,
    make_cu_seqlens,
    make_decay,
    make_inputs,
    make_log_decay,
    make_segment_ids,
    make_token_mask,
)
from hla.testing.libraries import Placement

# Distinct primes, so that a transposed or missing axis cannot go unnoticed.
T, B, H, D, DV, CHUNK = 37, 2, 3, 5, 7, 11
SHORT = 7
"""T of the gradients, whose differences move every entry."""
BATCH = (B, H)

Options: TypeAlias = dict[str, Any]

OPERATORS: tuple[tuple[str, int | None], ...] = (
    ("linear_attention", None),
    ("hla2", None),
    ("ahla", None),
    ("hla3", None),
    ("higher_order", 1),
    ("higher_order", 2),
    ("higher_order", 3),
    ("higher_order", 4),
    ("higher_order", 5),
)
FORMS = ("recurrent", "scan", "chunkwise", "parallel")
_PRINTED = ("hla2", "hla3")


@dataclass(frozen=True)
class Case:
    """Inputs and options, and the way they are checked.

    Attributes:
        name: as it is shown.
        options: makes the option arrays where the inputs live; receives the placement.
        inputs: keywords for `make_inputs` over the usual sizes.
        operators: the operators it exists for; None for all.
        max_order: the highest order it exists for.
        forms: the forms it exists for.
        kind: "whole": one call against the definition. "split": pieces, then single steps, with the state handed on.
            "packed": packed sequences whose returned states take one more token each. "gradient": `hla.vjp` and, where
            the library has one, its own differentiation, against finite differences.
        spoil: put NaN where `token_mask` is False.
    """

    name: str
    options: Callable[[Placement], Options] = lambda place: {}
    inputs: Options = field(default_factory=dict, hash=False)
    operators: tuple[str, ...] | None = None
    max_order: int = 99
    forms: tuple[str, ...] = FORMS
    kind: str = "whole"
    spoil: bool = False

    def exists_for(self, operator: str, order: int | None, form: str) -> bool:
        """Whether the contract defines the case for an operator in a form."""
        if self.operators is not None and operator not in self.operators:
            return False
        if order is not None and order < 4 and self.name not in ("plain", "split, decay per head"):
            return False  # orders 1 to 3 are the named operators: two cases show that
        return form in self.forms and (order is None or order <= self.max_order)

    @property
    def dtype(self) -> str:
        """Of q, k, v and o."""
        return str(self.inputs.get("dtype", "float32"))

    def make(self, place: Placement) -> tuple[Inputs, Options]:
        """Inputs and options on a placement."""
        sizes: Options = {"T": T, "d": D, "dv": DV, "batch": BATCH, "seed": 1, **self.inputs}
        q, k, v = make_inputs(place.xp, device=place.device, **sizes)
        options = {"chunk_size": CHUNK, **self.options(place)}
        if self.spoil:
            q, k, v = (_spoil(place, x, options["token_mask"]) for x in (q, k, v))
        if options.get("axis") == -3:
            q, k, v = (place.xp.moveaxis(x, -2, -3) for x in (q, k, v))
        return Inputs(q, k, v), options


def _spoil(place: Placement, x: Array, present: Array) -> Array:
    xp = place.xp
    return xp.where(present[..., None], x, xp.full_like(x, float("nan")))


def _decay(place: Placement) -> Options:
    return {"decay": make_decay(place.xp, batch=(H,), device=place.device, seed=2)}


def _log_decay(place: Placement) -> Options:
    return {"log_decay": make_log_decay(place.xp, T=T, batch=(H,), device=place.device, seed=3)}


def _resets(place: Placement) -> Options:
    return {"log_decay": make_log_decay(place.xp, T=T, batch=(H,), resets=2, device=place.device, seed=3)}


def _few_resets(place: Placement) -> Options:
    return {"log_decay": make_log_decay(place.xp, T=SHORT, batch=(H,), resets=1, device=place.device, seed=3)}


def _token_mask(place: Placement) -> Options:
    return {"token_mask": make_token_mask(place.xp, T=T, batch=(B, 1), device=place.device, seed=4)}


def _segment_ids(place: Placement) -> Options:
    return {"segment_ids": make_segment_ids(place.xp, T=T, count=5, device=place.device, seed=5)}


def _cu_seqlens(place: Placement) -> Options:
    return {"cu_seqlens": make_cu_seqlens(place.xp, T=T, count=5, device=place.device, seed=5)}


def _with(*makers: Callable[[Placement], Options], **fixed: Any) -> Callable[[Placement], Options]:
    def made(place: Placement) -> Options:
        options: Options = {}
        for maker in makers:
            options |= maker(place)
        return options | fixed

    return made


_TILES = ("chunkwise", "parallel")
_POSITIVE = {"positive": True}
_SMALL = {"T": SHORT, "d": 3, "dv": 2, "batch": (1, H)}
_SMALL_POSITIVE = {**_SMALL, **_POSITIVE}
_WIDE = {"T": SHORT, "d": 3, "dv": 2, "batch": (H,), "v_batch": (B, H)}
"""v alone has a batch axis: states and passes have batch axes of their own, which sums must not mix up."""


def _gradient(name: str, *makers: Callable[[Placement], Options], **fixed: Any) -> Case:
    """A gradient case in chunks of three."""
    keywords = {n: fixed.pop(n) for n in ("inputs", "operators", "max_order", "forms", "kind") if n in fixed}
    return Case(
        name=f"gradient, {name}",
        options=_with(*makers, chunk_size=3, **fixed),
        **{"inputs": _SMALL, "kind": "gradient", **keywords},
    )


CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("one chunk", _with(chunk_size=64)),
    Case("default chunk", _with(chunk_size=None)),
    Case("scale 0.37", _with(scale=0.37)),
    Case("scale -2, decay", _with(_decay, scale=-2.0)),
    Case("decay 0.9", _with(decay=0.9)),
    Case("decay per head", _decay),
    Case("log_decay", _log_decay),
    Case("log_decay, resets", _resets),
    Case("normalize", _with(normalize=True), _POSITIVE),
    Case("normalize, decay, eps", _with(_decay, normalize=True, eps=0.5), _POSITIVE),
    Case("prefix", _with(mask="prefix"), max_order=3),
    Case("prefix, resets, normalize", _with(_resets, mask="prefix", normalize=True), _POSITIVE, max_order=3),
    Case("none", _with(mask="none"), forms=_TILES),
    Case("none, packed, normalize", _with(_segment_ids, mask="none", normalize=True), _POSITIVE, forms=_TILES),
    Case("none, token_mask, scale", _with(_token_mask, mask="none", scale=0.37), forms=_TILES, spoil=True),
    Case("as printed", _with(definition="as_printed"), operators=_PRINTED),
    Case("as printed, decay", _with(_decay, definition="as_printed"), operators=_PRINTED),
    Case("as printed, resets", _with(_resets, definition="as_printed"), operators=_PRINTED),
    Case("as printed, packed", _with(_decay, _segment_ids, definition="as_printed"), operators=_PRINTED),
    Case("as printed, normalize", _with(definition="as_printed", normalize=True), _POSITIVE, operators=_PRINTED),
    Case("ridge", _with(ridge=0.7), operators=("hla2",)),
    Case("ridge, decay, normalize", _with(_decay, ridge=0.7, normalize=True), _POSITIVE, operators=("hla2",)),
    Case("ridge, prefix, resets", _with(_resets, ridge=0.7, mask="prefix"), operators=("hla2",)),
    Case("ridge, none", _with(ridge=0.7, mask="none"), operators=("hla2",), forms=_TILES),
    Case("ridge, as printed", _with(_decay, ridge=0.7, definition="as_printed"), operators=("hla2",)),
    Case("token_mask, NaN behind it", _token_mask, spoil=True),
    Case("token_mask, decay", _with(_token_mask, _decay), spoil=True),
    Case("token_mask, resets", _with(_token_mask, _resets), spoil=True),
    Case("segment_ids, decay", _with(_segment_ids, _decay)),
    Case("segment_ids, resets", _with(_segment_ids, _resets)),
    Case("cu_seqlens, decay, normalize", _with(_cu_seqlens, _decay, normalize=True), _POSITIVE),
    Case("packed states", _cu_seqlens, kind="packed"),
    Case("packed states, decay", _with(_cu_seqlens, _decay), kind="packed"),
    Case("split, decay per head", _decay, kind="split"),
    Case("split, resets, normalize", _with(_resets, normalize=True), _POSITIVE, kind="split"),
    Case("split, token_mask, decay", _with(_token_mask, _decay), kind="split", spoil=True),
    Case("split, prefix, normalize", _with(mask="prefix", normalize=True), _POSITIVE, max_order=3, kind="split"),
    Case("split, as printed", _with(_decay, definition="as_printed"), operators=_PRINTED, kind="split"),
    Case("split, ridge", _with(_decay, ridge=0.7), operators=("hla2",), kind="split"),
    Case("grouped heads", _with(decay=0.9), {"batch": (B, 1, H), "kv_batch": (B, 1, 1)}),
    Case("multi-query, split", inputs={"kv_batch": ()}, kind="split"),
    Case("wide v", _decay, {"batch": (H,), "v_batch": BATCH}),
    Case("wide v, split", _decay, {"batch": (H,), "v_batch": BATCH}, kind="split"),
    Case("time first", _with(_decay, axis=-3)),
    Case("T = 0", inputs={"T": 0}),
    Case("T = 1, normalize", _with(normalize=True), {"T": 1, **_POSITIVE}),
    Case("d = dv = 1", inputs={"d": 1, "dv": 1, **_POSITIVE}),
    Case("no batch axes", inputs={"batch": ()}),
    Case("empty batch", inputs={"batch": (0, H)}),
    Case("float64", _decay, {"dtype": "float64"}),
    Case("float64, split, resets", _resets, {"dtype": "float64"}, kind="split"),
    Case("float16", _decay, {"dtype": "float16"}),
    Case("bfloat16", _decay, {"dtype": "bfloat16"}),
    Case("bfloat16, split", _decay, {"dtype": "bfloat16"}, kind="split"),
    _gradient("plain"),
    _gradient("decay", _decay),
    _gradient("decay 0.9, scale", decay=0.9, scale=0.37),
    _gradient("resets", _few_resets),
    _gradient("normalize", _decay, normalize=True, inputs=_SMALL_POSITIVE),
    _gradient("prefix", _decay, mask="prefix", max_order=3),
    _gradient("none", mask="none", forms=_TILES),
    _gradient("as printed", _decay, definition="as_printed", operators=_PRINTED),
    _gradient("ridge", _decay, ridge=0.7, operators=("hla2",)),
    _gradient("float64", _decay, inputs={**_SMALL, "dtype": "float64"}),
    _gradient("grouped heads", decay=0.9, inputs={**_SMALL, "kv_batch": (1, 1)}),
    _gradient("wide v", decay=0.9, inputs=_WIDE),
    _gradient("through a state", _decay, kind="gradient through a state"),
    _gradient("through a state, wide v", _decay, inputs=_WIDE, kind="gradient through a state"),
    _gradient(
        "through a state, wide v, prefix",
        _decay,
        mask="prefix",
        inputs=_WIDE,
        max_order=3,
        kind="gradient through a state",
    ),
)
"""All cases of the matrix, in the order in which they are shown."""
