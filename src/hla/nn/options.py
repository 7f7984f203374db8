"""What a layer can be told, for layers of any framework: the names, the defaults, and every refusal at construction.

A layer reads its options once. What contradicts itself is refused here, before there are any parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hla import features
from hla.arrays import is_integer, is_number
from hla.backends.selection import names_of
from hla.cost import cost
from hla.errors import OptionError, message
from hla.nn.refusals import check_count
from hla.options import FORMS

OPERATORS = ("linear_attention", "hla2", "ahla", "hla3")
NORMS = ("rms", "l2")
LEARNED_DECAYS = ("learned", "forget_gate")
DECAY_RANGE = (0.97, 0.999)
"""γ at the start of training: from the first to the last head, 1 − γ spaced geometrically."""
CONV_SIZE = 4
WITHOUT_CHUNKS = ("recurrent", "scan")

Decay = float | Sequence[float] | str | None

DEFAULTS: Mapping[str, Any] = {
    "operator": "hla2",
    "num_kv_heads": None,
    "head_dim": None,
    "value_dim": None,
    "causal": True,
    "decay": "auto",
    "decay_range": None,
    "qk_norm": "rms",
    "feature_map": "identity",
    "conv_size": "auto",
    "rotary": False,
    "rotary_base": 10_000.0,
    "output_norm": True,
    "output_gate": True,
    "norm_eps": 1e-6,
    "normalize": False,
    "eps": 1e-6,
    "ridge": 0.0,
    "scale": None,
    "dropout": 0.0,
    "bias": False,
    "form": "auto",
    "chunk_size": None,
    "backend": None,
}
"""What `HigherOrderAttention` is told by default."""


@dataclass(frozen=True)
class HeadGroup:
    """Heads that one call of an operator computes: as many query heads of each of some key/value heads."""

    operator: str
    heads: tuple[int, ...]
    """query heads, those of one key/value head next to each other"""
    kv_heads: tuple[int, ...]

    @property
    def per_kv_head(self) -> int:
        """Query heads that share a key/value head."""
        return len(self.heads) // len(self.kv_heads)


@dataclass(frozen=True)
class OperatorOptions:
    """The options of an operator that a layer fixes; `decay` is a number here."""

    operator: str
    causal: bool
    decay: float | None
    scale: float
    normalize: bool
    eps: float
    ridge: float
    form: str
    chunk_size: int | None
    backend: Any

    @property
    def mask(self) -> str:
        """As the operators call it."""
        return "causal" if self.causal else "none"

    def keywords(self, decay: Any, log_decay: Any, token_mask: Any) -> dict[str, Any]:
        """What a call of the operator is told, and one of `hla.step`: the options and the call's own arrays."""
        own = self.decay
        if own is not None and (decay is not None or log_decay is not None):
            raise OptionError(
                message("decay", f"none, as the module has decay={own}", "another one in the call",
                        "Make the module with decay=None.")
            )  # fmt: skip
        return {
            "decay": own if decay is None else decay,
            "log_decay": log_decay,
            "scale": self.scale,
            "normalize": self.normalize,
            "eps": self.eps,
            "ridge": self.ridge,
            "mask": self.mask,
            "token_mask": token_mask,
            "backend": self.backend,
        }


@dataclass(frozen=True)
class LayerOptions:
    """The options of `HigherOrderAttention` with its defaults filled in."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    operators: tuple[str, ...]
    """one for each query head"""
    causal: bool
    decay: tuple[float, ...] | str | None
    """numbers, one for each key/value head; or "learned", "forget_gate" """
    decay_range: tuple[float, float]
    qk_norm: str | None
    feature_map: str
    conv_size: int | None
    rotary: bool
    rotary_base: float
    output_norm: bool
    output_gate: bool
    norm_eps: float
    normalize: bool
    eps: float
    ridge: float
    scale: float
    dropout: float
    bias: bool
    form: str
    chunk_size: int | None
    backend: Any

    def groups(self) -> tuple[HeadGroup, ...]:
        """The calls that together compute all heads."""
        share = self.num_heads // self.num_kv_heads
        found: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
        for kv_head in range(self.num_kv_heads):
            mine: dict[str, list[int]] = {}
            for head in range(kv_head * share, (kv_head + 1) * share):
                mine.setdefault(self.operators[head], []).append(head)
            for operator, heads in mine.items():
                found.setdefault((operator, len(heads)), []).append((kv_head, heads))
        return tuple(
            HeadGroup(operator, tuple(h for _, heads in entries for h in heads), tuple(kv for kv, _ in entries))
            for (operator, _), entries in found.items()
        )

    def operator_options(self, group: HeadGroup) -> OperatorOptions:
        """What one group's operator is told; decays that are no single number are given in each call."""
        single = self.single_decay()
        return OperatorOptions(
            operator=group.operator,
            causal=self.causal,
            decay=single,
            scale=self.scale,
            normalize=self.normalize,
            eps=self.eps,
            ridge=self.ridge if group.operator == "hla2" else 0.0,
            form=self.form,
            chunk_size=self.chunk_size,
            backend=self.backend,
        )

    def arguments(self) -> dict[str, Any]:
        """The keywords that make another layer with these options."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told["operator"] = list(told.pop("operators"))
        if not isinstance(self.decay, str):
            told |= {"decay": None if self.decay is None else list(self.decay), "decay_range": None}
        return told

    def widths(self) -> tuple[int, int, int]:
        """Channels of q, k and v, all heads together."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, self.num_kv_heads * self.value_dim

    def flops(self, length: int, batch: int) -> int:
        """Floating-point operations of the forward pass: of projections, convolutions and operators."""
        check_count("length", length, "the number of tokens")
        check_count("batch", batch)
        outputs = self.num_heads * self.value_dim
        raised = sum(self.widths()) + outputs + (outputs if self.output_gate else 0)
        raised += self.num_kv_heads if self.decay == "forget_gate" else 0
        total = 2 * (self.d_model * raised + (self.conv_size or 0) * sum(self.widths())) * length
        for group in self.groups():
            own = self.operator_options(group)
            total += cost(
                own.operator,
                T=length,
                d=self.head_dim,
                dv=self.value_dim,
                heads=len(group.heads),
                form=own.form if own.form != "auto" else "chunkwise",
                chunk_size=own.chunk_size,
                normalize=own.normalize,
                mask=own.mask,
                ridge=own.ridge,
            ).flops
        return total * batch

    def single_decay(self) -> float | None:
        """The decay where it is one number for all heads."""
        return self.decay[0] if isinstance(self.decay, tuple) and len(set(self.decay)) == 1 else None

    def decays_at_start(self) -> list[float]:
        """γ of each key/value head before training."""
        low, high = (1.0 - x for x in self.decay_range)
        last = self.num_kv_heads - 1
        at = [i / last for i in range(last + 1)] if last else [0.5]
        return [1.0 - low * (high / low) ** x for x in at]


def read_layer_options(
    *,
    d_model: int,
    num_heads: int,
    operator: str | Sequence[str],
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    causal: bool,
    decay: Decay,
    decay_range: tuple[float, float] | None,
    qk_norm: str | None,
    feature_map: str,
    conv_size: int | str | None,
    rotary: bool,
    rotary_base: float,
    output_norm: bool,
    output_gate: bool,
    norm_eps: float,
    normalize: bool,
    eps: float,
    ridge: float,
    scale: float | None,
    dropout: float,
    bias: bool,
    form: str,
    chunk_size: int | None,
    backend: Any,
) -> LayerOptions:
    """The options, checked, with defaults filled in; OptionError for what contradicts itself."""
    for name, flag in (
        ("causal", causal),
        ("rotary", rotary),
        ("output_norm", output_norm),
        ("output_gate", output_gate),
        ("bias", bias),
    ):
        _check_flag(name, flag)
    d_model, num_heads = _size("d_model", d_model), _size("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else _size("num_kv_heads", num_kv_heads)
    _check_kv_heads(num_heads, num_kv_heads)
    if head_dim is None:
        if d_model % num_heads:
            raise OptionError(
                message("head_dim", f"a size, as num_heads = {num_heads} does not divide d_model = {d_model}", "None",
                        "Pass head_dim=…; heads together need not be as wide as the model.")
            )  # fmt: skip
        head_dim = d_model // num_heads
    head_dim = _size("head_dim", head_dim)
    value_dim = head_dim if value_dim is None else _size("value_dim", value_dim)
    if qk_norm is not None:
        _one_of("qk_norm", qk_norm, NORMS, "None for none.")
    _one_of("feature_map", feature_map, features.NAMES, "Check the spelling.")
    if rotary and head_dim % 2:
        raise OptionError(
            message("head_dim", "an even size with rotary=True", repr(head_dim), "Features are rotated in pairs.")
        )
    check_rotary_base(rotary_base)
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise OptionError(message("dropout", "a probability in [0, 1)", repr(dropout), "0 for none."))
    check_norm_eps(norm_eps)
    operators = _operators(operator, num_heads)
    if is_number(ridge) and ridge != 0 and "hla2" not in operators:
        raise OptionError(
            message("ridge", f"0 for {', '.join(sorted(set(operators)))}", repr(ridge),
                    "Algorithm 1's ridge exists for hla2 only: use it in some head, or drop ridge.")
        )  # fmt: skip
    read_decay, read_range = _decay(decay, decay_range, causal, num_kv_heads)
    common = read_operator_options(
        operator="hla2",
        causal=causal,
        decay=None,
        scale=_scale(scale, head_dim, qk_norm),
        normalize=normalize,
        eps=eps,
        ridge=ridge,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )
    return LayerOptions(
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        operators=operators,
        causal=causal,
        decay=read_decay,
        decay_range=read_range,
        qk_norm=qk_norm,
        feature_map=feature_map,
        conv_size=_conv_size(conv_size, causal),
        rotary=rotary,
        rotary_base=float(rotary_base),
        output_norm=output_norm,
        output_gate=output_gate,
        norm_eps=float(norm_eps),
        normalize=normalize,
        eps=common.eps,
        ridge=common.ridge,
        scale=common.scale,
        dropout=float(dropout),
        bias=bias,
        form=form,
        chunk_size=common.chunk_size,
        backend=common.backend,
    )


def read_operator_options(
    *,
    operator: str,
    causal: bool,
    decay: float | None,
    scale: float,
    normalize: bool,
    eps: float,
    ridge: float,
    form: str,
    chunk_size: int | None,
    backend: Any,
) -> OperatorOptions:
    """The options of a module around one operator, checked."""
    _one_of("operator", operator, OPERATORS, "Check the spelling.")
    _check_flag("causal", causal)
    _check_flag("normalize", normalize)
    if decay is not None:
        if not is_number(decay):
            got = repr(decay) if isinstance(decay, (str, bool)) else type(decay).__name__
            raise OptionError(
                message("decay", "a number in (0, 1] or None", got,
                        "Decays of heads or tokens go into each call: decay=… or log_decay=….")
            )  # fmt: skip
        _check_decay(decay)
        if not causal:
            raise _bidirectional("decay", repr(decay))
    if not is_number(scale) or not math.isfinite(scale):
        raise OptionError(message("scale", "a finite number", repr(scale), "It multiplies q once."))
    if not is_number(eps) or not 0 <= eps < math.inf:
        raise OptionError(message("eps", "a number ≥ 0", repr(eps), "Pass a small number, e.g. 1e-6."))
    if not is_number(ridge) or not math.isfinite(ridge):
        raise OptionError(message("ridge", "a finite number", repr(ridge), "Pass λ of Algorithm 1, 0 for none."))
    if ridge != 0 and operator != "hla2":
        raise OptionError(
            message("ridge", f"0 for {operator}", repr(ridge), "Algorithm 1's ridge exists for hla2 only.")
        )
    _one_of("form", form, FORMS, "Check the spelling.")
    if not causal and form in WITHOUT_CHUNKS:
        raise _bidirectional("form", repr(form), '"auto", "chunkwise" or "parallel"')
    if chunk_size is not None and (not is_integer(chunk_size) or chunk_size < 1):
        raise OptionError(
            message("chunk_size", "an integer ≥ 1 or None", repr(chunk_size), "None lets the backend choose.")
        )
    names_of(backend)  # raises for names that no backend has
    return OperatorOptions(
        operator=operator,
        causal=causal,
        decay=None if decay is None else float(decay),
        scale=float(scale),
        normalize=normalize,
        eps=float(eps),
        ridge=float(ridge),
        form=form,
        chunk_size=None if chunk_size is None else int(chunk_size),
        backend=tuple(backend) if isinstance(backend, list) else backend,
    )


def check_softmax_sizes(d_model: int, num_heads: int, num_kv_heads: int) -> None:
    """OptionError unless a softmax layer can have these sizes."""
    _check_kv_heads(num_heads, num_kv_heads)
    if d_model % (2 * num_heads):
        raise OptionError(
            message("d_model", f"a multiple of twice num_heads = {num_heads} in softmax layers", repr(d_model),
                    "Heads need an even number of features for rotary positions.")
        )  # fmt: skip


def check_rotary_base(value: Any) -> None:
    """OptionError unless rotary rates can have this base."""
    if not is_number(value) or not 1 < value < math.inf:
        raise OptionError(message("rotary_base", "a number above 1", repr(value), "10000 is usual."))


def check_norm_eps(value: Any, name: str = "norm_eps") -> None:
    """OptionError unless this keeps a norm away from 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise OptionError(message(name, "a small number > 0", repr(value), "1e-6 is usual."))


def _check_kv_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise OptionError(
            message("num_kv_heads", f"a divisor of num_heads = {num_heads}", repr(num_kv_heads),
                    "Every key/value head serves as many query heads.")
        )  # fmt: skip


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(message(name, "True or False", repr(value), "Pass a Python bool."))


def _size(name: str, value: Any) -> int:
    if not is_integer(value) or value < 1:
        raise OptionError(message(name, "an integer ≥ 1", repr(value), "Pass a size."))
    return int(value)


def _one_of(name: str, value: Any, allowed: Sequence[str], todo: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(message(name, f"one of {', '.join(allowed)}", repr(value), todo))


def _bidirectional(name: str, got: str, expected: str = "None") -> OptionError:
    return OptionError(
        message(name, f"{expected} with causal=False", got, "A bidirectional layer has no order of time: drop it.")
    )


def _operators(operator: str | Sequence[str], num_heads: int) -> tuple[str, ...]:
    if isinstance(operator, str):
        _one_of("operator", operator, OPERATORS, "Check the spelling.")
        return (operator,) * num_heads
    if not isinstance(operator, (list, tuple)) or len(operator) != num_heads:
        got = f"{len(operator)} names" if isinstance(operator, (list, tuple)) else repr(operator)
        raise OptionError(
            message("operator", f"a name, or a list of one for each of num_heads = {num_heads} heads", got,
                    "For example 4 * ['hla2'] + 4 * ['ahla'].")
        )  # fmt: skip
    for i, name in enumerate(operator):
        _one_of(f"operator[{i}]", name, OPERATORS, "Check the spelling.")
    return tuple(operator)


def _check_decay(value: Any, name: str = "decay") -> None:
    if not is_number(value) or not 0 < value <= 1:
        raise OptionError(
            message(name, "a number in (0, 1]", repr(value), "γ multiplies the state at every token; None is 1.")
        )


def _decay(
    decay: Any, decay_range: Any, causal: bool, num_kv_heads: int
) -> tuple[tuple[float, ...] | str | None, tuple[float, float]]:
    """(fixed decays or the kind of learned ones, where learned ones start)."""
    found: tuple[float, ...] | str | None
    if isinstance(decay, str) and decay == "auto":
        found = "forget_gate" if causal else None
    elif decay is None:
        found = None
    elif isinstance(decay, str):
        _one_of("decay", decay, ("auto", *LEARNED_DECAYS), "Or pass a number, one for each key/value head, or None.")
        found = decay
    elif isinstance(decay, (list, tuple)):
        if len(decay) != num_kv_heads:
            raise OptionError(
                message("decay", f"one number for each of num_kv_heads = {num_kv_heads} key/value heads",
                        f"{len(decay)}", "Heads that share keys share the decay.")
            )  # fmt: skip
        for i, x in enumerate(decay):
            _check_decay(x, f"decay[{i}]")
        found = tuple(float(x) for x in decay)
    else:
        _check_decay(decay)
        found = (float(decay),) * num_kv_heads
    if found is not None and not causal:
        raise _bidirectional("decay", repr(decay))
    if decay_range is None:
        return found, DECAY_RANGE
    if not isinstance(found, str):
        raise OptionError(
            message("decay_range", "None unless the decay is learned", repr(decay_range),
                    'It is where decay="learned" and decay="forget_gate" start: choose one, or drop it.')
        )  # fmt: skip
    fits = isinstance(decay_range, (list, tuple)) and len(decay_range) == 2 and all(is_number(x) for x in decay_range)
    if not fits or not 0 < decay_range[0] <= decay_range[1] < 1:
        raise OptionError(
            message(
                "decay_range", "two numbers 0 < low ≤ high < 1", repr(decay_range), f"{DECAY_RANGE} is the default."
            )
        )
    return found, (float(decay_range[0]), float(decay_range[1]))


def _conv_size(conv_size: Any, causal: bool) -> int | None:
    if isinstance(conv_size, str) and conv_size == "auto":
        return CONV_SIZE if causal else None
    if conv_size is None:
        return None
    if not is_integer(conv_size) or conv_size < 1:
        raise OptionError(message("conv_size", "an integer ≥ 1, None or 'auto'", repr(conv_size), "4 is usual."))
    if not causal:
        raise _bidirectional("conv_size", repr(conv_size))
    return int(conv_size)


def _scale(scale: Any, head_dim: int, qk_norm: str | None) -> Any:
    """By default products of random q and k have unit variance: d^(-1/2), or d^(1/2) for vectors of unit length."""
    if scale is not None:
        return scale
    return float(head_dim) ** (0.5 if qk_norm == "l2" else -0.5)
