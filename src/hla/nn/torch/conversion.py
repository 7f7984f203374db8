"""From softmax attention to `HigherOrderAttention` in a model that is there already, with the projections it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hla import arrays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.torch.attention import HigherOrderAttention

Builder = Callable[..., nn.Module | None]
"""Of a block and the options of `convert`: what takes the block's place, or None to leave it."""

Projection = nn.Linear | Tensor | tuple[Tensor, Tensor | None]
"""A linear layer, its weight alone, or weight and bias."""

_FIXED = ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "bias", "device", "dtype")
_WITHOUT_RANDOM_WEIGHTS: dict[str, Any] = {"conv_size": None, "output_gate": False}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Report:
    """What `convert` did.

    Attributes:
        replaced: names of the blocks that were replaced, "" for the module itself.
        left: names of the blocks that were left alone, each with the reason.
    """

    replaced: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"replaced: {_called(name)}" for name in self.replaced]
        return "\n".join([*lines, *(f"left alone: {_called(name)}: {reason}" for name, reason in self.left.items())])


def _called(name: str) -> str:
    return name or "the module itself"


class ConvertedAttention(nn.Module):
    """A `HigherOrderAttention` that is called like the `nn.MultiheadAttention` whose place it takes.

    `attention` is the layer, for its states and its step. Masks say only what the layer knows already, so any other is
    refused. Outputs at padding are 0.

    Args:
        attention: the layer.
        batch_first: whether inputs are (B, T, d_model), else (T, B, d_model); (T, d_model) is one sequence.
    """

    in_proj_weight = None
    in_proj_bias = None  # no fast path of nn.TransformerEncoderLayer, which would compute softmax attention itself
    _qkv_same_embed_dim = False

    def __init__(self, attention: HigherOrderAttention, batch_first: bool) -> None:
        super().__init__()
        self.attention = attention
        self.batch_first = batch_first
        self.embed_dim = attention.options.d_model
        self.num_heads = attention.options.num_heads
        self.head_dim = attention.options.head_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As `nn.MultiheadAttention`, but `need_weights` is off by default, as there are no weights.

        Args:
            query: (B, T, d_model), (T, B, d_model) or (T, d_model).
            key: the same tensor.
            value: the same tensor.
            key_padding_mask: bool (B, T), True for padding, or floating with −∞ there and 0 elsewhere.
            need_weights: False.
            attn_mask: None or, where the layer is causal, the causal mask (T, T): bool, or floating with −∞ and 0.
            average_attn_weights: without effect.
            is_causal: that `attn_mask` is the causal mask, whose values are not looked at then.

        Returns:
            (y, None).

        Raises:
            OptionError: weights are asked for, key or value is another tensor, a mask says something else.
            ShapeError: a mask of another shape.
        """
        if not (_same(query, key) and _same(query, value)):
            raise OptionError(
                message("key, value", "the tensor that is the query", "another one",
                        "Cross-attention has no higher-order form: leave this block alone, "
                        "convert(…, skip=[its name]).")
            )  # fmt: skip
        if need_weights:
            raise OptionError(
                message(
                    "need_weights", "False", "True", "No weights are computed here: leave the block alone with skip."
                )
            )
        if query.ndim not in (2, 3):
            raise ShapeError(
                message("query", "two or three axes", f"shape {tuple(query.shape)}", "Pass (T, d_model) or a batch.")
            )
        batched = query.ndim == 3
        x = query if batched else query[None]
        turned = batched and not self.batch_first
        if turned:
            x = x.transpose(0, 1)
        self._check_attn_mask(attn_mask, is_causal, x.shape[1])
        padding = None if key_padding_mask is None else _blocked("key_padding_mask", key_padding_mask)
        if padding is not None and not batched:
            padding = padding[None]
        y: Tensor = self.attention(x, key_padding_mask=padding)
        if turned:
            y = y.transpose(0, 1)
        return (y if batched else y[0]), None

    def _check_attn_mask(self, mask: Tensor | None, is_causal: bool, length: int) -> None:
        if not self.attention.options.causal:
            if mask is not None or is_causal:
                got = "is_causal=True" if mask is None else "a mask"
                raise OptionError(
                    message("attn_mask", "None, as the block was converted with causal=False", got,
                            "Drop the mask, or convert with causal=True if it is the causal one.")
                )  # fmt: skip
            return
        if mask is None:
            return
        if tuple(mask.shape) != (length, length):
            raise ShapeError(
                message("attn_mask", f"None or the causal mask ({length}, {length})", f"shape {tuple(mask.shape)}",
                        "The block is causal without it; use key_padding_mask for padding.")
            )  # fmt: skip
        if is_causal:
            return
        if arrays.is_traced(mask):
            raise OptionError(
                message("attn_mask", "None, or is_causal=True beside it, while the call is traced", "a mask alone",
                        "Pass is_causal=True if it is the causal mask.")
            )  # fmt: skip
        wanted = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
        if not bool((_blocked("attn_mask", mask) == wanted).all()):
            raise OptionError(
                message("attn_mask", "None or the causal mask", "another one",
                        "Higher-order attention is causal or sees everything: drop the mask, or leave the block alone "
                        "with skip.")
            )  # fmt: skip

    def extra_repr(self) -> str:
        """The layout."""
        return f"batch_first={self.batch_first}"


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, or views of the same values with the same graph behind them."""
    if x is y:
        return True
    if arrays.is_traced(x) or arrays.is_traced(y) or x.requires_grad != y.requires_grad:
        return False
    return x.dtype == y.dtype and arrays.same_memory(x, y)


def _blocked(name: str, mask: Tensor) -> Tensor:
    """A mask as bool, True where nothing passes; OptionError for floating values other than 0 and −∞."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        raise DTypeError(message(name, "a bool or floating mask", f"{mask.dtype}", "Convert it: mask.bool()."))
    blocked = mask == -torch.inf
    if not arrays.is_traced(mask) and not bool((blocked | (mask == 0)).all()):
        raise OptionError(
            message(name, "0 and −∞ only in a floating mask", "other values",
                    "There are no scores to add a bias to: use a bool mask, or leave the block alone with skip.")
        )  # fmt: skip
    return blocked


def _refuse_fixed(options: Mapping[str, Any]) -> None:
    for name in _FIXED:
        if name in options:
            raise OptionError(message(name, "none, as the weights fix it", repr(options[name]), "Drop it."))


def from_projections(
    q: Projection,
    k: Projection,
    v: Projection,
    out: Projection,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    operator: Any = "hla2",
    **options: Any,
) -> HigherOrderAttention:
    r"""A `HigherOrderAttention` with projections that are there already: copies of their weights and biases.

    Parts that would start with random weights are off unless asked for: `conv_size` is None, `output_gate` False.

    Args:
        q: a linear layer, its weight (H·d, d_model), or a pair of weight and bias.
        k: likewise, (Hkv·d, d_model).
        v: likewise, (Hkv·dv, d_model).
        out: likewise, (d_model, H·dv).
        num_heads: query heads H, next to each other in the rows of q.
        num_kv_heads: key/value heads Hkv, H by default.
        operator: as for `HigherOrderAttention`.
        **options: likewise.

    Returns:
        The layer, on the device and in the dtype of the weights; a parameter is trainable where what it was copied from
        requires a gradient.

    Raises:
        ShapeError: sizes that do not go together.
        DTypeError: weights of several dtypes or devices.
        OptionError: an option that the weights fix, a bias in some projections only, or as `HigherOrderAttention`.

    Example:
        >>> import torch
        >>> from hla.nn.torch import from_projections
        >>> packed, out = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)
        >>> q, k, v = packed.weight.chunk(3)
        >>> layer = from_projections(q, k, v, out.weight, num_heads=3, decay=0.9)
        >>> torch.equal(layer.v_proj.weight, packed.weight[24:])
        True
    """
    _refuse_fixed(options)
    parts = {name: _weights(x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))}
    weights = {name: weight for name, (weight, _) in parts.items()}
    biases = [bias for _, bias in parts.values() if bias is not None]
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.dtype.is_floating_point:
            got = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise DTypeError(
                message(name, "an nn.Linear, a floating matrix (out, in), or (matrix, bias)", got,
                        "Pass its weight and bias; Conv1D of Transformers keeps (in, out): (weight.T, bias).")
            )  # fmt: skip
    for name, (weight, bias) in parts.items():
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
            got = f"{tuple(bias.shape)}" if isinstance(bias, Tensor) else type(bias).__name__
            raise ShapeError(message(name, f"a bias {tuple(weight.shape[:1])}", got, "One number for each row."))
    found = {(x.dtype, x.device) for x in (*weights.values(), *biases)}
    if len(found) > 1:
        raise DTypeError(
            message("q, k, v, out", "weights of one dtype on one device", _listed(found), "Convert or move them first.")
        )
    if biases and len(biases) < len(parts):
        without = ", ".join(name for name, (_, bias) in parts.items() if bias is None)
        raise OptionError(
            message("q, k, v, out", "a bias in all or in none", f"none in {without}", "Add biases of zeros.")
        )
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not arrays.is_integer(heads) or heads < 1:
            raise OptionError(message(name, "an integer ≥ 1", repr(heads), "Pass a number of heads."))
    d_model = weights["q"].shape[1]
    d, rest = divmod(weights["q"].shape[0], num_heads)
    dv, rest_v = divmod(weights["v"].shape[0], num_kv_heads)
    wanted = {
        "q": (num_heads * d, d_model),
        "k": (num_kv_heads * d, d_model),
        "v": (num_kv_heads * dv, d_model),
        "out": (d_model, num_heads * dv),
    }
    if rest or rest_v or any(tuple(weights[name].shape) != shape for name, shape in wanted.items()):
        raise ShapeError(
            message("q, k, v, out", f"weights for {num_heads} query and {num_kv_heads} key/value heads",
                    ", ".join(f"{name} {tuple(x.shape)}" for name, x in weights.items()),
                    "q is (H·d, d_model), k (Hkv·d, d_model), v (Hkv·dv, d_model), out (d_model, H·dv).")
        )  # fmt: skip
    layer = HigherOrderAttention(
        d_model,
        num_heads,
        operator=operator,
        num_kv_heads=num_kv_heads,
        head_dim=d,
        value_dim=dv,
        bias=bool(biases),
        device=weights["q"].device,
        dtype=weights["q"].dtype,
        **{**_WITHOUT_RANDOM_WEIGHTS, **options},
    )
    own = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj, "out": layer.out_proj}
    for name, (weight, bias) in parts.items():
        _copy(own[name].weight, weight)
        if bias is not None:
            _copy(own[name].bias, bias)
    return layer


def _weights(x: Any) -> tuple[Any, Any]:
    if isinstance(x, tuple) and len(x) == 2:
        return x
    return (x.weight, x.bias) if isinstance(x, nn.Linear) else (x, None)


def _copy(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
    parameter.requires_grad_(value.requires_grad)


def _listed(found: Collection[tuple[torch.dtype, torch.device]]) -> str:
    return ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))


def convert(
    module: nn.Module,
    operator: Any = "hla2",
    *,
    causal: bool = True,
    blocks: Mapping[type[nn.Module], Builder] | None = None,
    skip: Collection[str] = (),
    **options: Any,
) -> tuple[nn.Module, Report]:
    r"""Replace softmax attention in a model by higher-order attention, in place, keeping the projections.

    Every `nn.MultiheadAttention` becomes a `ConvertedAttention`, called in the same way, around a
    `HigherOrderAttention` with copies of its weights, its dropout (of features now, not of weights), dtype, device,
    mode and `requires_grad`. Blocks of other kinds are replaced by builders of yours. All is built before anything is
    replaced: after an error the model is as it was.

    Left alone, with the reason in the report: cross-attention (`kdim`, `vdim`, and `multihead_attn` in
    `nn.TransformerDecoderLayer`), `add_bias_kv`, `add_zero_attn`, subclasses, blocks with hooks, parametrizations, or
    weights of several dtypes or devices, or weights that another module has, too (a block in several places is replaced
    in all of them).

    Args:
        module: a model, or one block.
        operator: as for `HigherOrderAttention`.
        causal: True for causal attention, whether or not calls bring a mask; False for bidirectional.
        blocks: builders by exact type: ``builder(block, operator=…, causal=…, **options)`` returns the module that
            takes the block's place, or None to leave it. `from_projections` makes the layer of one.
        skip: names of blocks to leave alone, as in ``module.named_modules()``.
        **options: as for `HigherOrderAttention`, without those that the weights fix. `conv_size` is None and
            `output_gate` False by default, as they would start with random weights.

    Returns:
        (module, report): the module that came in (its replacement where it is a block itself) and a `Report`.

    Raises:
        OptionError: nothing was found that could be replaced, a name in `skip` that is none, an option that the weights
            fix, or as `HigherOrderAttention`.
        DTypeError: `module` is no module, or a builder returned something else.

    Example:
        >>> import torch, hla
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> model, report = hla.nn.convert(model, "ahla", decay=0.9)
        >>> report.replaced, model(torch.randn(2, 7, 12)).shape
        (('self_attn',), torch.Size([2, 7, 12]))
    """
    if not isinstance(module, nn.Module):
        raise DTypeError(message("module", "a torch.nn.Module", type(module).__name__, "Pass the model."))
    _refuse_fixed(options)
    skipped = {skip} if isinstance(skip, str) else set(skip)
    unknown = skipped - {name for name, _ in module.named_modules(remove_duplicate=False)}
    if unknown:
        raise OptionError(
            message("skip", "names of module.named_modules()", ", ".join(sorted(unknown)), "Check the spelling.")
        )
    builders: dict[type[nn.Module], Builder] = {nn.MultiheadAttention: _of_multihead, **(blocks or {})}
    told = {"operator": operator, "causal": causal, **options}
    made: dict[int, nn.Module | str] = {}
    places: list[tuple[str, nn.Module | None, str, nn.Module]] = []
    left: dict[str, str] = {}
    found_blocks = list(_blocks(module, builders))
    shared = _shared(module, {id(block): block for *_, block in found_blocks}.values())
    for name, parent, attribute, block in found_blocks:
        reason = _reason(parent, attribute, block, name in skipped, builders, shared)
        if not reason:
            if id(block) not in made:
                made[id(block)] = _build(name, block, builders, told)
            new = made[id(block)]
            if isinstance(new, nn.Module):
                places.append((name, parent, attribute, new))
                continue
            reason = new
        left[name] = reason
    if not places:
        got = "; ".join(f"{_called(name)}: {why}" for name, why in left.items())
        raise OptionError(
            message("module", "attention that can be replaced", got or "none",
                    "Blocks of other kinds need a builder: convert(…, blocks={type(block): builder}).")
        )  # fmt: skip
    for _, parent, attribute, new in places:
        if parent is None:
            module = new
        else:
            setattr(parent, attribute, new)
    for found in module.modules():
        if isinstance(found, nn.TransformerEncoder) and any(isinstance(x, ConvertedAttention) for x in found.modules()):
            found.use_nested_tensor = False  # padding as nested tensors exists for the fast path only
    return module, Report(tuple(name for name, *_ in places), left)


def _blocks(
    module: nn.Module, builders: Mapping[type[nn.Module], Builder], name: str = "", parent: nn.Module | None = None
) -> Iterator[tuple[str, nn.Module | None, str, nn.Module]]:
    """(name, parent, attribute, block) of every place of a block, which may have several; not inside of blocks."""
    if type(module) in builders or isinstance(module, nn.MultiheadAttention):
        yield name, parent, name.rpartition(".")[2], module
        return
    for attribute, child in module._modules.items():
        if child is not None:
            yield from _blocks(child, builders, f"{name}.{attribute}" if name else attribute, module)


def _shared(module: nn.Module, blocks: Collection[nn.Module]) -> set[int]:
    """Parameters, by id, that several blocks have, or a block and a module elsewhere."""
    inside = {id(part) for block in blocks for part in block.modules()}
    owned = [block.parameters() for block in blocks]
    owned += [part.parameters(recurse=False) for part in module.modules() if id(part) not in inside]
    counts = Counter(id(p) for parameters in owned for p in parameters)
    return {p for p, count in counts.items() if count > 1}


def _reason(
    parent: nn.Module | None,
    attribute: str,
    block: nn.Module,
    skipped: bool,
    builders: Mapping[type[nn.Module], Builder],
    shared: Collection[int],
) -> str:
    """Why a block is left alone, "" if it is not."""
    if skipped:
        return "in skip"
    if type(block) not in builders:
        return f"{type(block).__name__} is a subclass of nn.MultiheadAttention, which may compute something else"
    if builders[type(block)] is not _of_multihead:
        return ""
    assert isinstance(block, nn.MultiheadAttention)
    if isinstance(parent, nn.TransformerDecoderLayer) and attribute == "multihead_attn":
        return "cross-attention"
    if not block._qkv_same_embed_dim:
        return f"cross-attention: kdim={block.kdim}, vdim={block.vdim} beside embed_dim={block.embed_dim}"
    if block.bias_k is not None or block.bias_v is not None:
        return "add_bias_kv: it has a key and a value beside those of the tokens"
    if block.add_zero_attn:
        return "add_zero_attn: it has a key and a value beside those of the tokens"
    if any(getattr(x, hooks, None) for x in block.modules() for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    if parametrize.is_parametrized(block.out_proj):
        return "it has parametrizations, which would be lost"
    if any(id(x) in shared for x in block.parameters()):
        return "another module has the same weights, which copies would part"
    found = {(x.dtype, x.device) for x in block.parameters()}
    return f"weights of several dtypes or devices: {_listed(found)}" if len(found) > 1 else ""


def _build(
    name: str, block: nn.Module, builders: Mapping[type[nn.Module], Builder], told: dict[str, Any]
) -> nn.Module | str:
    new = builders[type(block)](block, **told)
    if new is None:
        return "its builder returned None"
    if not isinstance(new, nn.Module):
        raise DTypeError(
            message(f"blocks[{type(block).__name__}]", "a torch.nn.Module or None", type(new).__name__,
                    f"That is what the builder returned for {_called(name)}.")
        )  # fmt: skip
    return new.train(block.training)


def _of_multihead(block: nn.Module, **options: Any) -> ConvertedAttention:
    """The builder for `nn.MultiheadAttention`."""
    assert isinstance(block, nn.MultiheadAttention)
    projections = []
    weight, bias = block.in_proj_weight, block.in_proj_bias
    for i in range(3):
        rows = slice(i * block.embed_dim, (i + 1) * block.embed_dim)
        made = nn.Linear(block.embed_dim, block.embed_dim, bias=bias is not None, device="meta", dtype=weight.dtype)
        made.weight = nn.Parameter(weight[rows].detach(), requires_grad=weight.requires_grad)
        if bias is not None:
            made.bias = nn.Parameter(bias[rows].detach(), requires_grad=bias.requires_grad)
        projections.append(made)
    q, k, v = projections
    told = {"dropout": block.dropout, **options}
    attention = from_projections(q, k, v, block.out_proj, num_heads=block.num_heads, **told)
    return ConvertedAttention(attention, block.batch_first)
