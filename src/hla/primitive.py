r"""Linear attention without decay over all tokens, within packed sequences: what mask="none" is made of there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hla.arrays import Array, Device, DType, Namespace, transpose
from hla.chunkwise import chunk
from hla.decays import Decays
from hla.family import Program, Read, Spec, State
from hla.loops import Tokens, fold


@dataclass(frozen=True, eq=False, slots=True)
class Setting:
    """How one pass of the primitive runs. starts is that of `hla.problem.Problem`."""

    xp: Namespace
    dtype: DType
    placed: dict[str, Device]
    chunk_size: int
    strict: bool = False
    starts: Array | None = None

    def zeros(self, b: Array, c: Array) -> Array:
        """The zero state Σ b cᵀ, at the batch axes of both streams and of the boundaries."""
        like = transpose(self.xp, b[..., :1, :]) * c[..., :1, :]  # on a JAX mesh also spread like them
        if self.starts is not None:
            like = self.xp.where(self.starts[..., :1, :], like, like)
        return self.xp.zeros_like(like)


def _program(strict: bool) -> Program:
    return Program(Spec("linear_attention"), (State("X", "b", "c", 1),), (Read("r", "a", "X", strict),), (("r", 1.0),))


def forward(setting: Setting, a: Array, b: Array, c: Array) -> Array:
    """LA_1(a, b, c), or LAx_1 when strict: (*batch, T, dv)."""
    xp, program = setting.xp, _program(setting.strict)
    decays = Decays(xp, setting.dtype, setting.placed, None)

    def body(state: Array, tokens: Tokens, _: None) -> tuple[Array, Tokens, None]:
        streams: dict[str, Array] = {"a": tokens["a"], "b": tokens["b"], "c": tokens["c"]}
        decay = decays.chunk(int(streams["a"].shape[-2]), None, tokens["starts"])
        state = chunk(xp, program, decay, {"X": state}, streams)["X"]
        return state, {"r": streams["r"]}, None

    tokens: Tokens = {"a": a, "b": b, "c": c, "starts": setting.starts}
    _, outputs, _ = fold(xp, body, setting.zeros(b, c), tokens, int(a.shape[-2]), setting.chunk_size)
    return outputs["r"]


def reversed_time(setting: Setting) -> Setting:
    """The setting under which flipped streams see each other as in `setting`."""
    starts = setting.starts
    if starts is None:
        return setting
    xp = setting.xp
    shifted = xp.concat([starts[..., 1:, :], xp.zeros_like(starts[..., :1, :])], axis=-2)
    return replace(setting, starts=xp.flip(shifted, axis=-2))
