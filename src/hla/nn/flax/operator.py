"""The operator as a module, for q, k and v that are ready."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

import hla
from hla.nn.options import OperatorOptions, read_operator_options
from hla.nn.refusals import check_batch, no_state


class HigherOrderOperator(nnx.Module):
    r"""One operator of the family with its options, without parameters: what `hla.hla2` and the others compute.

    Args:
        operator: "hla2", "ahla", "hla3" or "linear_attention".
        causal: False for the bidirectional operator, which has neither decay nor state.
        decay: γ in (0, 1], or None; each call may bring its own instead.
        scale: multiplies q.
        normalize: as for the operators, like `eps`, `ridge`, `form`, `chunk_size` and `backend`.
        eps: see `normalize`.
        ridge: see `normalize`.
        form: see `normalize`.
        chunk_size: see `normalize`.
        backend: see `normalize`.

    Raises:
        OptionError: an option is not allowed, or two contradict each other.
        UnknownBackendError: `backend` names none that is registered.

    Example:
        >>> import jax
        >>> from hla.nn.flax import HigherOrderOperator
        >>> q, k, v = (jax.random.normal(jax.random.key(n), (2, 3, 11, n), "float32") for n in (8, 8, 5))
        >>> attend = HigherOrderOperator("ahla", decay=0.9, scale=8**-0.5)
        >>> o, state = attend(q, k, v, return_state=True)
        >>> o_t, state = attend.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)
        >>> o.shape, o_t.shape
        ((2, 3, 11, 5), (2, 3, 5))
    """

    def __init__(
        self,
        operator: str = "hla2",
        *,
        causal: bool = True,
        decay: float | None = None,
        scale: float = 1.0,
        normalize: bool = False,
        eps: float = 1e-6,
        ridge: float = 0.0,
        form: str = "auto",
        chunk_size: int | None = None,
        backend: Any = None,
    ) -> None:
        self.options: OperatorOptions = read_operator_options(
            operator=operator,
            causal=causal,
            decay=decay,
            scale=scale,
            normalize=normalize,
            eps=eps,
            ridge=ridge,
            form=form,
            chunk_size=chunk_size,
            backend=backend,
        )

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        state: Any = None,
        return_state: bool = False,
        *,
        decay: Array | None = None,
        log_decay: Array | None = None,
        token_mask: Array | None = None,
        cu_seqlens: Array | None = None,
        axis: int = -2,
    ) -> Any:
        """The whole sequence, or the part of it that follows `state`.

        Args:
            q: (*batch, T, d).
            k: (*batch, T, d); batch axes broadcast, as for the operators.
            v: (*batch, T, dv).
            state: what an earlier call or `init_state` returned, at the batch of these tokens.
            return_state: return (o, state).
            decay: as for the operators, in place of the module's own.
            log_decay: likewise.
            token_mask: as for the operators; False skips a token.
            cu_seqlens: as for the operators; states have a leading axis of sequences.
            axis: the time axis.

        Returns:
            o (*batch, T, dv), or (o, state).

        Raises:
            OptionError, ShapeError, DTypeError: as the operators; a state of another batch is a ShapeError.
        """
        options = self.options
        check_batch(state, (q, k, v), axis, cu_seqlens)
        return getattr(hla, options.operator)(
            q,
            k,
            v,
            **self.options.keywords(decay, log_decay, token_mask),
            cu_seqlens=cu_seqlens,
            initial_state=state,
            return_state=return_state,
            axis=axis,
            form=options.form,
            chunk_size=options.chunk_size,
        )

    def step(
        self,
        q_t: Array,
        k_t: Array,
        v_t: Array,
        state: Any,
        *,
        decay: Array | None = None,
        log_decay: Array | None = None,
        token_mask: Array | None = None,
    ) -> tuple[Array, Any]:
        """One token, (*batch, d) and (*batch, dv): (o_t, state).

        Raises:
            OptionError: the operator is bidirectional, or the state is another operator's.
            DTypeError: `state` is no state.
            ShapeError: the state is of another batch.
        """
        if not self.options.causal:
            raise no_state("step")
        check_batch(state, (q_t, k_t, v_t), None)
        return hla.step(state, q_t, k_t, v_t, **self.options.keywords(decay, log_decay, token_mask))

    def init_state(
        self,
        batch: tuple[int, ...],
        d: int,
        dv: int,
        *,
        kv_batch: tuple[int, ...] | None = None,
        dtype: Any = jnp.float32,
    ) -> Any:
        """The state before the first token: `hla.init_state` with this module's options.

        Raises:
            OptionError: the operator is bidirectional, or a size is none.
        """
        options = self.options
        if not options.causal:
            raise no_state("init_state")
        return hla.init_state(
            options.operator,
            batch=batch,
            d=d,
            dv=dv,
            like=jnp.zeros(0, dtype),
            kv_batch=kv_batch,
            normalize=options.normalize,
            ridge=options.ridge,
        )
