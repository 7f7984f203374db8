"""The operator as a module, for q, k and v that are ready."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hla
from hla.nn.options import OperatorOptions, read_operator_options
from hla.nn.refusals import check_batch, no_state
from hla.nn.torch.slices import Kept


class HigherOrderOperator(nn.Module):
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
        process_group: where sequences are spread over processes, the group (or DeviceMesh, as for
            `hla.distributed.torch`) in the order of whose ranks the slices lie; None where they are not.

    Raises:
        OptionError: an option is not allowed, or two contradict each other.
        UnknownBackendError: `backend` names none that is registered.

    Example:
        >>> import torch
        >>> from hla.nn.torch import HigherOrderOperator
        >>> q, k, v = torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 5)
        >>> attend = HigherOrderOperator("ahla", decay=0.9, scale=8**-0.5)
        >>> o, state = attend(q, k, v, return_state=True)
        >>> o_t, state = attend.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)
        >>> o.shape, o_t.shape
        (torch.Size([2, 3, 11, 5]), torch.Size([2, 3, 5]))
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
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self._kept = Kept(process_group)
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

    @property
    def process_group(self) -> Any:
        """The group of processes that share sequences, or None. It is no part of a state dict or of a pickle."""
        return self._kept.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._kept = Kept(group)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any = None,
        return_state: bool = False,
        *,
        decay: Tensor | None = None,
        log_decay: Tensor | None = None,
        token_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        axis: int = -2,
        session: Any = None,
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
            session: of a layer with a process group, what its ranks have agreed on.

        Returns:
            o (*batch, T, dv), or (o, state).

        Raises:
            OptionError, ShapeError, DTypeError: as the operators; a state of another batch is a ShapeError.
        """
        options, group = self.options, self.process_group
        given: dict[str, Any] = {
            "cu_seqlens": cu_seqlens,
            "initial_state": state,
            "return_state": return_state,
            "axis": axis,
            "form": options.form,
            "chunk_size": options.chunk_size,
        }
        if group is None:
            check_batch(state, (q, k, v), axis, cu_seqlens)
            return getattr(hla, options.operator)(
                q, k, v, **self.options.keywords(decay, log_decay, token_mask), **given
            )
        from hla.distributed.torch.operators import Sharing, run

        refusal: Exception | None = None
        try:
            check_batch(state, (q, k, v), axis, cu_seqlens)
            given |= self.options.keywords(decay, log_decay, token_mask)
        except Exception as error:  # the other ranks have to hear of it
            refusal = error
        return run(options.operator, q, k, v, given, Sharing(group, session=session, refusal=refusal))

    def step(
        self,
        q_t: Tensor,
        k_t: Tensor,
        v_t: Tensor,
        state: Any,
        *,
        decay: Tensor | None = None,
        log_decay: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """One token, (*batch, d) and (*batch, dv): (o_t, state). The given state is not written to.

        Raises:
            OptionError: the operator is bidirectional, or the state is another operator's.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """The state before the first token: `hla.init_state` with this module's options.

        Raises:
            OptionError: the operator is bidirectional, or a size is none.
        """
        options = self.options
        if not options.causal:
            raise no_state("init_state")
        like = torch.empty(0, device=device, dtype=dtype)
        return hla.init_state(
            options.operator,
            batch=batch,
            d=d,
            dv=dv,
            like=like,
            kv_batch=kv_batch,
            normalize=options.normalize,
            ridge=options.ridge,
        )

    def extra_repr(self) -> str:
        """The options that are not at their defaults."""
        defaults = {"causal": True, "decay": None, "scale": 1.0, "normalize": False, "eps": 1e-6, "ridge": 0.0,
                    "form": "auto", "chunk_size": None, "backend": None}  # fmt: skip
        options = self.options
        told = [f"{name}={getattr(options, name)!r}" for name, x in defaults.items() if getattr(options, name) != x]
        if self._kept.shared:
            told.append("process_group=…")
        return ", ".join([repr(options.operator), *told])
