"""Random but reproducible inputs: the same numbers in every library, from NumPy's generator and a seed."""

from __future__ import annotations

from typing import Any, NamedTuple

from hla.arrays import FLOATING, Array, Device, DType, Namespace, cast
from hla.errors import OptionError, message


class Inputs(NamedTuple):
    """Arguments of an operator."""

    q: Array
    """(*batch, T, d)"""
    k: Array
    """(*kv_batch, T, d)"""
    v: Array
    """(*kv_batch, T, dv)"""


def make_inputs(
    xp: Namespace,
    *,
    T: int,
    d: int,
    dv: int,
    batch: tuple[int, ...] = (),
    kv_batch: tuple[int, ...] | None = None,
    v_batch: tuple[int, ...] | None = None,
    dtype: DType | str = "float32",
    device: Device = None,
    seed: int = 0,
    positive: bool = False,
) -> Inputs:
    r"""Gaussian q, k, v; the rows of q and k have length about 1, so that low precision does not overflow.

    Args:
        xp: the library's namespace.
        T: tokens.
        d: features of q and k.
        dv: features of v.
        batch: batch axes of q.
        kv_batch: batch axes of k and v where they differ, e.g. (B, Hkv, 1) for grouped heads.
        v_batch: batch axes of v where they differ from those of k.
        dtype: a dtype of `xp` or its name; "bfloat16" on NumPy needs ml_dtypes.
        device: a device of `xp`, None for the default.
        seed: the same seed gives the same numbers in every library.
        positive: absolute values of q and k, so that denominators (Eq. 3.4) are not near zero.

    Returns:
        `Inputs` of three arrays.

    Example:
        >>> import numpy as np
        >>> q, k, v = make_inputs(np, T=7, d=3, dv=5, batch=(2,))
        >>> q.shape, k.shape, v.shape, q.dtype.name
        ((2, 7, 3), (2, 7, 3), (2, 7, 5), 'float32')
    """
    rng = _rng(seed)
    kv_batch = batch if kv_batch is None else kv_batch
    v_batch = kv_batch if v_batch is None else v_batch
    made = [rng.standard_normal((*axes, T, size)) for axes, size in ((batch, d), (kv_batch, d), (v_batch, dv))]
    made[:2] = [x / d**0.5 for x in made[:2]]
    if positive:
        made[:2] = [abs(x) for x in made[:2]]
    return Inputs(*(to_library(xp, x, dtype, device) for x in made))


def make_decay(
    xp: Namespace,
    *,
    batch: tuple[int, ...] = (),
    low: float = 0.8,
    dtype: DType | str = "float32",
    device: Device = None,
    seed: int = 0,
) -> Array:
    """Constant decays γ between `low` and 1: (*batch,).

    Args:
        xp: the library's namespace.
        batch: its shape.
        low: the smallest value.
        dtype: a dtype of `xp` or its name.
        device: a device of `xp`.
        seed: of the generator.

    Example:
        >>> import numpy as np
        >>> gamma = make_decay(np, batch=(3,))
        >>> gamma.shape, bool(np.all((gamma >= 0.8) & (gamma <= 1)))
        ((3,), True)
    """
    return to_library(xp, _rng(seed).uniform(low, 1.0, batch), dtype, device)


def make_log_decay(
    xp: Namespace,
    *,
    T: int,
    batch: tuple[int, ...] = (),
    mean: float = 0.1,
    resets: int = 0,
    dtype: DType | str = "float32",
    device: Device = None,
    seed: int = 0,
) -> Array:
    """Log-decays per token, −log γ exponentially distributed with the given mean: (*batch, T).

    Args:
        xp: the library's namespace.
        T: tokens.
        batch: batch axes.
        mean: mean of −log γ.
        resets: how many tokens, drawn anew for every sequence, get −∞, which forgets all before.
        dtype: a dtype of `xp` or its name.
        device: a device of `xp`.
        seed: of the generator.

    Example:
        >>> import numpy as np
        >>> x = make_log_decay(np, T=11, batch=(2,), resets=1)
        >>> x.shape, int(np.isinf(x).sum())
        ((2, 11), 2)
    """
    rng = _rng(seed)
    x = -rng.exponential(mean, (*batch, T))
    if resets:
        for row in x.reshape(-1, T):
            row[rng.choice(T, size=min(resets, T), replace=False)] = -float("inf")
    return to_library(xp, x, dtype, device)


def make_token_mask(
    xp: Namespace, *, T: int, batch: tuple[int, ...] = (), keep: float = 0.7, device: Device = None, seed: int = 0
) -> Array:
    """A mask that keeps a share of the tokens: bool (*batch, T).

    Example:
        >>> import numpy as np
        >>> make_token_mask(np, T=5, seed=1).tolist()
        [True, False, True, False, True]
    """
    return to_library(xp, _rng(seed).random((*batch, T)) < keep, None, device)


def make_cu_seqlens(xp: Namespace, *, T: int, count: int, device: Device = None, seed: int = 0) -> Array:
    """Offsets of `count` packed sequences, of which one at least is empty where count > 1: int64 (count + 1,).

    Example:
        >>> import numpy as np
        >>> make_cu_seqlens(np, T=20, count=4).tolist()
        [0, 10, 10, 17, 20]
    """
    return to_library(xp, _offsets(T, count, seed), None, device)


def make_segment_ids(xp: Namespace, *, T: int, count: int, device: Device = None, seed: int = 0) -> Array:
    """The packed sequences of `make_cu_seqlens` as a number per token: int64 (T,).

    Example:
        >>> import numpy as np
        >>> make_segment_ids(np, T=6, count=3).tolist()
        [0, 0, 0, 0, 2, 2]
    """
    import numpy as np

    offsets = _offsets(T, count, seed)
    return to_library(xp, np.repeat(np.arange(count), np.diff(offsets)), None, device)


def _offsets(T: int, count: int, seed: int) -> Any:
    import numpy as np

    cuts = np.sort(_rng(seed).integers(0, T + 1, count - 1))
    if count > 2:
        cuts[1] = cuts[0]
    elif count == 2:
        cuts[0] = 0
    return np.concatenate([[0], cuts, [T]]).astype(np.int64)


def _rng(seed: int) -> Any:
    import numpy as np

    return np.random.default_rng(seed)


def to_library(xp: Namespace, x: Any, dtype: DType | str | None, device: Device) -> Array:
    """A NumPy array in another library, rounded to `dtype` (None keeps the dtype)."""
    placed = {} if device is None else {"device": device}
    if dtype is None:
        return xp.asarray(x, **placed)
    wanted = find_dtype(xp, dtype) if isinstance(dtype, str) else dtype
    if x.dtype == float and not has_float64(xp):
        x = x.astype("float32")
    return cast(xp, xp.asarray(x, **placed), wanted)


def has_float64(xp: Namespace) -> bool:
    """Whether the library has float64 as it is set up now; JAX only with ``jax_enable_x64``."""
    return bool(xp.zeros(1, dtype=xp.float64).dtype == xp.float64) if "jax" not in xp.__name__ else _jax_x64()


def _jax_x64() -> bool:
    import jax

    return bool(jax.dtypes.canonicalize_dtype("float64") == "float64")


def find_dtype(xp: Namespace, name: str) -> DType:
    """A library's floating dtype by its common name; OptionError where it has none of that name."""
    if name in FLOATING:
        if hasattr(xp, name):
            return getattr(xp, name)
        if name == "bfloat16" and xp.__name__.endswith("numpy") and "jax" not in xp.__name__:
            try:
                import ml_dtypes
            except ImportError:
                pass
            else:
                import numpy as np

                return np.dtype(ml_dtypes.bfloat16)
    raise OptionError(
        message("dtype", f"a floating dtype of {xp.__name__}", repr(name), f"One of {', '.join(FLOATING)}.")
    )
