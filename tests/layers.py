"""The layer of `hla.nn` written out plainly in float64 NumPy, and the options that its tests run through.

Judge. `reference` computes one sequence at a time, head by head, with the definitions of `oracle`: no state, no mask,
no packing. Skipped tokens are taken out of the sequence before, packed sequences are taken apart.

Tolerance. Every rounding on the way from the inputs and parameters to an output acts like a change of some of them by a
relative u. `sensitivity` measures how far outputs move, token by token, when all of them are changed at random, per
unit of relative change. With n roundings in a row and the model of tests/budget.py the error is at most λ √n u times
that. Products with W sum d_model terms, three projections in a row; the operator adds its own s (2 T + d + 4); norms,
the convolution and rotary positions add a few. So n = s (2 T + d + 4) + 4 d_model + 64.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

import budget
import oracle

BATCH, TOKENS, D_MODEL, HEADS, D, DV = 2, 11, 13, 6, 8, 7
MIXED = ["hla2", "ahla", "hla2", "hla3", "linear_attention", "hla2"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "operator": ("hla2", "ahla", "hla3", "linear_attention", MIXED),
    "decay": ("forget_gate", None, 0.9, "learned", "numbers"),
    "num_kv_heads": (6, 3, 1),
    "qk_norm": ("rms", None, "l2"),
    "feature_map": ("identity", "elu+1", "relu", "softmax"),
    "conv_size": (4, None, 1),
    "rotary": (False, True),
    "output_norm": (True, False),
    "output_gate": (True, False),
    "normalize": (False, True),
    "ridge": (0.0, 0.3),
    "scale": (None, 0.7, -0.4),
    "bias": (False, True),
}
NUMBERS = {6: [0.9, 0.8, 0.95, 1.0, 0.5, 0.7], 3: [0.9, 1.0, 0.6], 1: [0.8]}
BIDIRECTIONAL: list[dict[str, Any]] = [
    {"operator": "hla2", "num_kv_heads": 3, "ridge": 0.3, "bias": True},
    {"operator": "ahla", "rotary": True, "qk_norm": "l2", "output_gate": False},
    {"operator": "hla3", "num_kv_heads": 1, "feature_map": "softmax", "normalize": True, "output_norm": False},
    {"operator": MIXED, "num_kv_heads": 3, "feature_map": "elu+1", "qk_norm": None, "scale": 0.2},
]
RICH: dict[str, Any] = {
    "operator": MIXED,
    "decay": "forget_gate",
    "num_kv_heads": 3,
    "feature_map": "softmax",
    "rotary": True,
    "normalize": True,
    "ridge": 0.3,
    "bias": True,
}
"""One configuration that has everything."""
MASKS = {
    "none": [[0] * TOKENS, [0] * TOKENS],
    "left": [[1] * 4 + [0] * 7, [0] * TOKENS],
    "right": [[0] * TOKENS, [0] * 6 + [1] * 5],
    "inside": [[0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1]],
    "all": [[1] * TOKENS, [0] * 3 + [1] * 8],
}
"""Of two rows; 1 is padding."""
OFFSETS = [0, 3, 3, 4, 9, 11, 11]
"""Of packed sequences, empty ones among them."""
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"d_model": 14}, "d_model=14, got d_model=13"),
    ({"num_heads": 3}, "num_heads=3, got num_heads=6"),
    ({"num_kv_heads": 3}, "num_kv_heads=3, got num_kv_heads=6"),
    ({"head_dim": 10}, "head_dim=10, got head_dim=8"),
    ({"value_dim": 5}, "value_dim=5, got value_dim=7"),
    (
        {"operator": "ahla"},
        "operators=('ahla', 'ahla', 'ahla', 'ahla', 'ahla', 'ahla'), got operators=('hla2', 'hla2',",
    ),
    ({"operator": MIXED}, "operators=('hla2', 'ahla', 'hla2', 'hla3', 'linear_attention', 'hla2'), got operators="),
    ({"decay": "learned"}, "decay='learned', got decay='forget_gate'"),
    ({"decay": None}, "decay=None, got decay='forget_gate'"),
    ({"decay": 0.9}, "decay=(0.9, 0.9, 0.9, 0.9, 0.9, 0.9), got decay='forget_gate'"),
    ({"qk_norm": "l2", "scale": 8**-0.5}, "qk_norm='l2', got qk_norm='rms'"),
    ({"qk_norm": None}, "qk_norm=None, got qk_norm='rms'"),
    ({"feature_map": "relu"}, "feature_map='relu', got feature_map='identity'"),
    ({"conv_size": None}, "conv_size=None, got conv_size=4"),
    ({"conv_size": 3}, "conv_size=3, got conv_size=4"),
    ({"rotary": True}, "rotary=True, got rotary=False"),
    ({"rotary_base": 500.0}, "rotary_base=500.0, got rotary_base=10000.0"),
    ({"output_norm": False}, "output_norm=False, got output_norm=True"),
    ({"output_gate": False}, "output_gate=False, got output_gate=True"),
    ({"norm_eps": 1e-5}, "norm_eps=1e-05, got norm_eps=1e-06"),
    ({"normalize": True}, "normalize=True, got normalize=False"),
    ({"eps": 1e-5}, "eps=1e-05, got eps=1e-06"),
    ({"ridge": 0.1}, "ridge=0.1, got ridge=0.0"),
    ({"scale": 0.5}, "scale=0.5, got scale=0.35"),
    ({"bias": True}, "bias=True, got bias=False"),
]
"""Options of a layer that does not take the states of one without them, and what its error says."""
SAME: list[dict[str, Any]] = [
    {"form": "recurrent"},
    {"chunk_size": 4},
    {"dropout": 0.1},
    {"decay_range": (0.5, 0.6)},
    {"backend": ["torch", "jax"]},
    {"scale": 8**-0.5, "num_kv_heads": 6},
]
"""Options of a layer that does."""
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"d_model": 0}, "d_model: expected an integer ≥ 1, got 0"),
    ({"d_model": 12.0}, "d_model: expected an integer ≥ 1, got 12.0"),
    ({"num_heads": True}, "num_heads: expected an integer ≥ 1, got True"),
    ({"num_heads": 5}, "head_dim: expected a size, as num_heads = 5 does not divide d_model = 12"),
    ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
    ({"num_kv_heads": 8}, "num_kv_heads: expected a divisor of num_heads = 4, got 8"),
    ({"num_kv_heads": 0}, "num_kv_heads: expected an integer ≥ 1"),
    ({"head_dim": -1}, "head_dim: expected an integer ≥ 1, got -1"),
    ({"value_dim": 0}, "value_dim: expected an integer ≥ 1, got 0"),
    ({"operator": "hla4"}, "operator: expected one of linear_attention, hla2, ahla, hla3, got 'hla4'"),
    ({"operator": "higher_order"}, "operator: expected one of"),
    ({"operator": ["hla2"] * 3}, "operator: expected a name, or a list of one for each of num_heads = 4 heads, got 3"),
    ({"operator": ["hla2", "hla2", "hla2", "softmax"]}, "operator[3]: expected one of"),
    ({"operator": 2}, "operator: expected a name, or a list"),
    ({"operator": "ahla", "ridge": 0.1}, "ridge: expected 0 for ahla, got 0.1"),
    ({"operator": ["ahla", "hla3"] * 2, "ridge": 0.1}, "ridge: expected 0 for ahla, hla3, got 0.1"),
    ({"ridge": float("nan")}, "ridge: expected a finite number"),
    ({"decay": 0.0}, "decay: expected a number in (0, 1], got 0.0"),
    ({"decay": 1.01}, "decay: expected a number in (0, 1], got 1.01"),
    ({"decay": float("nan")}, "decay: expected a number in (0, 1], got nan"),
    ({"decay": True}, "decay: expected a number in (0, 1], got True"),
    ({"decay": [0.9, 0.8]}, "decay: expected one number for each of num_kv_heads = 4 key/value heads, got 2"),
    ({"decay": [0.9, 0.9, 0.9, 2.0]}, "decay[3]: expected a number in (0, 1], got 2.0"),
    ({"decay": "gated"}, "decay: expected one of auto, learned, forget_gate, got 'gated'"),
    ({"decay": 0.9, "decay_range": (0.9, 0.99)}, "decay_range: expected None unless the decay is learned"),
    ({"decay": None, "decay_range": (0.9, 0.99)}, "decay_range: expected None unless the decay is learned"),
    ({"decay_range": (0.9, 1.0)}, "decay_range: expected two numbers 0 < low ≤ high < 1"),
    ({"decay_range": (0.99, 0.9)}, "decay_range: expected two numbers 0 < low ≤ high < 1"),
    ({"decay_range": 0.9}, "decay_range: expected two numbers"),
    ({"causal": False, "decay": 0.9}, "decay: expected None with causal=False, got 0.9"),
    ({"causal": False, "decay": "forget_gate"}, "decay: expected None with causal=False"),
    ({"causal": False, "decay_range": (0.9, 0.99)}, "decay_range: expected None unless the decay is learned"),
    ({"causal": False, "conv_size": 4}, "conv_size: expected None with causal=False, got 4"),
    ({"causal": False, "form": "recurrent"}, 'form: expected "auto", "chunkwise" or "parallel" with causal=False'),
    ({"causal": 1}, "causal: expected True or False, got 1"),
    ({"qk_norm": "layer"}, "qk_norm: expected one of rms, l2, got 'layer'"),
    ({"qk_norm": True}, "qk_norm: expected one of rms, l2, got True"),
    ({"feature_map": "elu"}, "feature_map: expected one of identity, elu+1, relu, softmax, got 'elu'"),
    ({"conv_size": 0}, "conv_size: expected an integer ≥ 1, None or 'auto', got 0"),
    ({"rotary": True, "head_dim": 5}, "head_dim: expected an even size with rotary=True, got 5"),
    ({"rotary_base": 1.0}, "rotary_base: expected a number above 1"),
    ({"output_norm": "rms"}, "output_norm: expected True or False"),
    ({"output_gate": None}, "output_gate: expected True or False"),
    ({"norm_eps": 0.0}, "norm_eps: expected a small number > 0"),
    ({"normalize": 1}, "normalize: expected True or False"),
    ({"eps": -1.0}, "eps: expected a number ≥ 0"),
    ({"scale": float("inf")}, "scale: expected a finite number"),
    ({"scale": "auto"}, "scale: expected a finite number"),
    ({"dropout": 1.0}, "dropout: expected a probability in [0, 1), got 1.0"),
    ({"bias": "no"}, "bias: expected True or False"),
    ({"form": "fast"}, "form: expected one of auto, recurrent, scan, chunkwise, parallel, got 'fast'"),
    ({"chunk_size": 0}, "chunk_size: expected an integer ≥ 1 or None, got 0"),
]
"""Options of a layer of width 12 with 4 heads, and what the refusal says."""


def sound(options: dict[str, Any]) -> bool:
    """Whether these options go together, and whether the result is a well-conditioned function of its inputs."""
    if options.get("ridge") and "operator" in options and "hla2" not in options["operator"]:
        return False
    # a denominator that changes sign has poles: nothing can be compared near them
    return not (options.get("normalize") and options.get("feature_map") == "identity")


def pairwise() -> list[dict[str, Any]]:
    """Configurations in which every two choices meet that can: greedily, the first that covers most comes next."""
    pairs = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(CHOICES, 2)
        for i, j in itertools.product(range(len(CHOICES[a])), range(len(CHOICES[b])))
        if sound({a: CHOICES[a][i], b: CHOICES[b][j]})
    }
    found = []
    while pairs:
        seed = min(pairs, key=lambda pair: sorted(pair))
        picked = dict(seed)
        for name, values in CHOICES.items():
            if name in picked:
                continue
            fitting = [
                i
                for i, value in enumerate(values)
                if sound({**{n: CHOICES[n][j] for n, j in picked.items()}, name: value})
            ]
            new = {i: sum(frozenset(((name, i), other)) in pairs for other in picked.items()) for i in fitting}
            picked[name] = max(fitting, key=lambda i: new[i])
        pairs -= {frozenset(pair) for pair in itertools.combinations(picked.items(), 2)}
        options = {name: CHOICES[name][i] for name, i in picked.items()}
        if options["decay"] == "numbers":
            options["decay"] = NUMBERS[options["num_kv_heads"]]
        if options["decay"] not in ("learned", "forget_gate") and picked["scale"] == 1:
            options["norm_eps"] = 1e-3
        if options["decay"] in ("learned", "forget_gate") and picked["scale"] == 1:
            options["decay_range"] = (0.6, 0.95)
        found.append(options)
    return found


CAUSAL = pairwise()


def name_of(options: dict[str, Any]) -> str:
    """What a configuration has in its own way."""
    operator = options["operator"]
    told = ["mixed" if isinstance(operator, list) else operator, f"{options.get('num_kv_heads', HEADS)}kv"]
    decay = options.get("decay", "none")
    told.append("numbers" if isinstance(decay, list) else str(decay))
    told += [str(options[x]) for x in ("qk_norm", "feature_map", "conv_size") if x in options]
    told += [x for x in ("rotary", "output_norm", "output_gate", "normalize", "ridge", "bias") if options.get(x)]
    return "-".join(told)


def passes(options: dict[str, Any]) -> int:
    """Passes of the primitive in a row."""
    operator = options.get("operator", "hla2")
    return max(budget.stages(x) for x in ([operator] if isinstance(operator, str) else operator))


def tolerance(options: dict[str, Any], length: int, unit: float) -> float:
    """λ √n u, to be multiplied with the sensitivity."""
    n = passes(options) * (2 * length + D + 4) + 4 * D_MODEL + 64
    return budget.LAMBDA * math.sqrt(n) * unit


# --- the layer -------------------------------------------------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def phi(x: Any, name: str) -> Any:
    """Feature maps over the last axis."""
    if name == "elu+1":
        return np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0)))
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "softmax":
        raised = np.exp(x / math.sqrt(x.shape[-1]))
        return raised / raised.sum(-1, keepdims=True)
    return x


def convolve(x: Any, weight: Any) -> Any:
    """SiLU of the causal convolution of x (T, channels), token by token."""
    size = len(weight)
    result = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(size, t + 1)):
            result[t] += weight[size - 1 - back] * x[t - back]
    return silu(result)


def turn(x: Any, base: float) -> Any:
    """Rotary positions of x (T, d): pairs of features as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def reference(parameters: dict[str, Any], x: Any, options: dict[str, Any], *, causal: bool = True) -> Any:
    """y (T, d_model) of one sequence x (T, d_model); parameters by the names of the layer's state_dict."""
    get = options.get
    kv_heads = get("num_kv_heads", HEADS)
    norm_eps = get("norm_eps", 1e-6)

    def project(name: str, value: Any) -> Any:
        y = value @ parameters[f"{name}.weight"].T
        return y + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else y

    q, k, v = (project(f"{name}_proj", x) for name in "qkv")
    if "q_conv.weight" in parameters:
        q, k, v = (convolve(y, parameters[f"{name}_conv.weight"]) for name, y in zip("qkv", (q, k, v), strict=True))

    def prepared(y: Any, which: str) -> Any:
        """One head of q or k."""
        y = phi(y, get("feature_map", "identity"))
        if get("qk_norm", "rms") == "rms":
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + norm_eps) * parameters[f"{which}_norm.weight"]
        elif get("qk_norm", "rms") == "l2":
            y = y / np.sqrt((y * y).sum(-1, keepdims=True) + norm_eps)
        return turn(y, get("rotary_base", 10_000.0)) if get("rotary", False) else y

    scale = get("scale")
    if scale is None:
        scale = D ** (0.5 if get("qk_norm", "rms") == "l2" else -0.5)
    outputs = []
    for head in range(HEADS):
        shared = head * kv_heads // HEADS
        operator = options["operator"] if isinstance(options["operator"], str) else options["operator"][head]
        o = oracle.attend(
            operator,
            prepared(q[:, head * D : (head + 1) * D], "q"),
            prepared(k[:, shared * D : (shared + 1) * D], "k"),
            v[:, shared * DV : (shared + 1) * DV],
            log_decay=log_decay(parameters, x, get("decay", None), shared),
            scale=scale,
            normalize=get("normalize", False),
            mask="causal" if causal else "none",
            ridge=get("ridge", 0.0) if operator == "hla2" else 0.0,
        )
        if "output_norm.weight" in parameters:
            o = o / np.sqrt((o * o).mean(-1, keepdims=True) + norm_eps) * parameters["output_norm.weight"][head]
        outputs.append(o)
    o = np.concatenate(outputs, -1)
    if "output_gate.weight" in parameters:
        o = o * silu(project("output_gate", x))
    return project("out_proj", o)


def log_decay(parameters: dict[str, Any], x: Any, decay: Any, kv_head: int) -> Any:
    """(T,) or None."""
    if decay is None:
        return None
    if decay == "forget_gate":
        raised = x @ parameters["decay.proj.weight"][kv_head] + parameters["decay.bias"][kv_head]
        return np.log(sigmoid(raised))
    if decay == "learned":
        return np.full(len(x), np.log(sigmoid(parameters["decay.bias"][kv_head])))
    return np.full(len(x), math.log(decay[kv_head] if isinstance(decay, list) else decay))


def batched(parameters: dict[str, Any], x: Any, options: dict[str, Any], *, causal: bool = True) -> Any:
    """`reference` of each row of x (B, T, d_model)."""
    return np.stack([reference(parameters, row, options, causal=causal) for row in x])


def sensitivity(parameters: dict[str, Any], x: Any, options: dict[str, Any], *, causal: bool = True) -> Any:
    """(B, T): how far outputs move per relative change of inputs and parameters; the largest of three random ones."""
    rng = np.random.default_rng(3)
    step = 1e-6
    at = batched(parameters, x, options, causal=causal)
    worst = np.abs(at).max(-1)  # the rounding of the result itself
    for _ in range(3):
        changed = {name: p * (1 + step * rng.normal(size=p.shape)) for name, p in parameters.items()}
        moved = batched(changed, x * (1 + step * rng.normal(size=x.shape)), options, causal=causal)
        worst = np.maximum(worst, np.abs(moved - at).max(-1) / step)
    return worst
