"""`hla.cost` against counts by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import hla

T, D, DV, HEADS, C = 1009, 5, 7, 3, 16

# Multiply-adds per token and head. A read of a state X = Σ b cᵀ by a: in its chunk the scores a·b, then their product
# with c; from earlier chunks a product with X. An update of X is one outer product. ahla and hla3 use the scores q·k
# twice and count them once.
WITHIN = {  # times c
    "linear_attention": D + DV,
    "hla2": (D + D) + (D + DV),
    "ahla": (D + DV) + DV,
    "hla3": (D + D) + DV + (D + DV),
}
ACROSS = {  # once as a read, once as an update
    "linear_attention": D * DV,
    "hla2": D * D + D * DV,
    "ahla": D * DV + D * DV,
    "hla3": D * D + D * DV + D * DV,
}
OPERATORS = list(WITHIN)


def cost(operator: str, **options: Any) -> Any:
    return hla.cost(operator, **{"T": T, "d": D, "dv": DV, "heads": HEADS, "chunk_size": C, **options})


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("chunk_size", [1, 16, 64, T])
def test_flops_of_chunks(operator: str, chunk_size: int) -> None:
    per_token = 2 * (chunk_size * WITHIN[operator] + 2 * ACROSS[operator])
    assert cost(operator, chunk_size=chunk_size).flops == per_token * T * HEADS
    assert cost(operator, chunk_size=chunk_size, form="auto") == cost(operator, chunk_size=chunk_size)


@pytest.mark.parametrize("operator", OPERATORS)
def test_flops_of_the_other_forms(operator: str) -> None:
    assert cost(operator, form="recurrent").flops == 4 * ACROSS[operator] * T * HEADS
    assert cost(operator, form="parallel").flops == 2 * (T * WITHIN[operator] + ACROSS[operator]) * T * HEADS
    assert cost(operator, form="scan").flops > cost(operator).flops


def test_the_formulas_of_the_documentation() -> None:
    """Linear attention 2C(d + dv) + 4·d·dv; HLA₂ twice that for d = dv."""
    for d, c in ((8, 16), (64, 64)):
        linear = hla.cost("linear_attention", T=1, d=d, dv=d, form="chunkwise", chunk_size=1).flops
        assert linear == 2 * (d + d) + 4 * d * d
        first = hla.cost("linear_attention", T=T, d=d, dv=d, chunk_size=c).flops
        assert hla.cost("hla2", T=T, d=d, dv=d, chunk_size=c).flops == 2 * first


def test_flops_of_options() -> None:
    base = cost("hla2").flops
    # a denominator is one more column of v: no new scores
    assert cost("hla2", normalize=True).flops - base == 2 * (C + 2 * D) * T * HEADS
    # ridge reads C = Σ q vᵀ by q
    assert cost("hla2", ridge=0.1).flops - base == 2 * (C * (D + DV) + 2 * D * DV) * T * HEADS
    # over the prefix: S by q, then Σ q vᵀ by the result
    assert cost("hla2", mask="prefix").flops == base
    # the whole sequence: every state is summed once and read once, no pairs of tokens
    for operator, states in (
        ("linear_attention", D * DV),
        ("hla2", D * D + D * DV),
        ("ahla", D * D + D * DV),
        ("hla3", 2 * D * D + D * DV),
    ):
        assert cost(operator, mask="none").flops == 4 * states * T * HEADS, operator


@pytest.mark.parametrize(("order", "operator"), [(1, "linear_attention"), (2, "hla2"), (3, "hla3")])
def test_orders_with_a_name(order: int, operator: str) -> None:
    assert cost("higher_order", order=order) == cost(operator)


def test_higher_orders() -> None:
    """Each further stage reads one more d×dv state with the scores q·u of the stages before it.

    At order 5 these are new: HLA₃ itself reads its q·u under the third power of the decay.
    """
    for order in (4, 5, 6, 7):
        difference = cost("higher_order", order=order).flops - cost("higher_order", order=order - 2).flops
        scores = D if order == 5 else 0
        assert difference == 2 * (C * (scores + DV) + 2 * D * DV) * T * HEADS
        more = cost("higher_order", order=order).state_bytes - cost("higher_order", order=order - 2).state_bytes
        assert more == 4 * D * DV * HEADS


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("linear_attention", {}),
    ("hla2", {}),
    ("hla2", {"normalize": True, "ridge": 0.1}),
    ("hla2", {"mask": "prefix"}),
    ("hla2", {"definition": "as_printed", "normalize": True}),
    ("ahla", {"mask": "prefix", "normalize": True}),
    ("hla3", {"definition": "as_printed"}),
    ("higher_order", {"order": 5, "normalize": True}),
]


@pytest.mark.parametrize(("operator", "options"), KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bytes_of_a_state(operator: str, options: dict[str, Any], dtype: str) -> None:
    """Those of a state itself: float32 whatever the inputs, float64 for float64."""
    like = np.zeros(1, np.float64 if dtype == "float64" else np.float32)
    state = hla.init_state(operator, batch=(HEADS,), d=D, dv=DV, like=like, **options)
    assert cost(operator, dtype=dtype, **options).state_bytes == sum(x.nbytes for x in state)


def test_a_state_does_not_grow() -> None:
    assert cost("hla3", T=1).state_bytes == cost("hla3", T=10**6).state_bytes
    assert cost("hla2", mask="none").state_bytes == 0


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_the_cache_it_replaces(dtype: str, size: int) -> None:
    assert cost("hla2", dtype=dtype).kv_cache_bytes == T * (D + DV) * size * HEADS


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
@pytest.mark.parametrize("sizes", [(5, 7), (64, 64), (64, 128), (2, 1)], ids=str)
def test_where_softmax_attention_falls_behind(operator: str, form: str, sizes: tuple[int, int]) -> None:
    """Causal softmax attention takes T²(d + dv): from the crossover on it takes more, before it does not."""
    d, dv = sizes

    def flops(tokens: int) -> int:
        return hla.cost(operator, T=tokens, d=d, dv=dv, form=form, chunk_size=1).flops

    crossing = hla.cost(operator, T=T, d=d, dv=dv, form=form, chunk_size=1).crossover
    assert crossing**2 * (d + dv) >= flops(crossing)
    assert (crossing - 1) ** 2 * (d + dv) < flops(crossing - 1)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_crossover_does_not_depend_on_the_length(operator: str) -> None:
    found = {hla.cost(operator, T=tokens, d=64, dv=64).crossover for tokens in (0, 1, 8, 64, 4096)}
    assert len(found) == 1


def test_memory_of_the_forms() -> None:
    """Chunks and tokens: whatever T. All pairs: T² for each pair of streams. Scan: more than a state per segment."""
    for operator in OPERATORS:
        for form in ("chunkwise", "recurrent"):
            assert cost(operator, form=form).activation_bytes == cost(operator, form=form, T=10 * T).activation_bytes
        assert cost(operator, form="recurrent").activation_bytes < cost(operator).activation_bytes
        pairs = {"linear_attention": 1, "hla2": 2, "ahla": 1, "hla3": 2}[operator]
        bytes_at = [cost(operator, form="parallel", T=n * T).activation_bytes for n in (1, 2, 3)]
        assert bytes_at[0] - 2 * bytes_at[1] + bytes_at[2] == 2 * pairs * T * T * 4 * HEADS
        segments = -(-T // C)
        assert cost(operator, form="scan").activation_bytes >= segments * cost(operator).state_bytes


def test_the_last_chunk_is_no_longer_than_the_sequence() -> None:
    """The crossover is about long sequences, so it keeps the chunk that was asked for."""
    short = dataclasses.replace(cost("hla2", T=8, chunk_size=8), crossover=0)
    for size in (64, None):
        assert dataclasses.replace(cost("hla2", T=8, chunk_size=size), crossover=0) == short


def test_no_tokens() -> None:
    found = cost("hla2", T=0)
    assert (found.flops, found.kv_cache_bytes) == (0, 0)
    assert found.state_bytes == cost("hla2").state_bytes


def test_whole_numbers() -> None:
    """Python integers, which do not overflow, also from NumPy's."""
    found = hla.cost("hla3", T=np.int32(2**31 - 1), d=np.int32(128), dv=np.int32(128), heads=np.int32(128))
    assert found.flops == hla.cost("hla3", T=2**31 - 1, d=128, dv=128, heads=128).flops
    assert found.flops > 2**53
    for name in ("flops", "state_bytes", "activation_bytes", "kv_cache_bytes", "crossover"):
        assert type(getattr(found, name)) is int


# Several devices

FIELDS = {  # numbers of a segment's fields, without ρ
    "linear_attention": D * DV,
    "hla2": D * D + 2 * D * DV,
    "ahla": D * D + 2 * D * DV,
    "hla3": 3 * D * D + 3 * D * DV,
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_bytes_sent(operator: str, devices: int) -> None:
    found = cost(operator, devices=devices)
    assert found.sent_bytes == found.backward_sent_bytes == (devices - 1) * (FIELDS[operator] + 1) * 4 * HEADS
    assert (found.devices, found.rounds) == (devices, 1)
    assert cost(operator, devices=devices, T=100 * T).sent_bytes == found.sent_bytes
    assert cost(operator, devices=devices, dtype="float64").sent_bytes == 2 * found.sent_bytes
    assert cost(operator, devices=devices, dtype="float16").sent_bytes == found.sent_bytes
    back = cost(operator, devices=devices, library="torch")
    assert back.backward_sent_bytes == (devices - 1) * back.state_bytes
    assert back.sent_bytes == found.sent_bytes


def test_bytes_sent_stage_by_stage() -> None:
    """States, and ρ each time. The printed third order has two rounds, of S, Q, P and of G, H, J."""
    for options, rounds, numbers in (
        ({"operator": "hla2", "method": "stages"}, 2, D * D + D * DV),
        ({"operator": "hla2", "definition": "as_printed"}, 2, D * D + 2 * D * DV),
        ({"operator": "hla3", "definition": "as_printed"}, 2, 2 * D * D + 4 * D * DV),
        ({"operator": "higher_order", "order": 6}, 4, D * D + 3 * D * DV),
        ({"operator": "hla2", "mask": "prefix"}, 1, D * D + D * DV),
        ({"operator": "hla2", "normalize": True}, 1, D * D + 2 * D * (DV + 1)),
    ):
        found = cost(devices=3, **options)
        assert (found.rounds, found.sent_bytes) == (rounds, 2 * (numbers + rounds) * 4 * HEADS), options


@pytest.mark.parametrize(("devices", "hops"), [(2, 1), (3, 2), (4, 3), (5, 3), (6, 4), (9, 4), (10, 5), (1024, 11)])
def test_doubling(devices: int, hops: int) -> None:
    found = cost("hla2", devices=devices, exchange="doubling")
    assert (found.rounds, found.sent_bytes) == (hops, hops * (FIELDS["hla2"] + 1) * 4 * HEADS)
    assert cost("hla2", devices=devices, exchange="doubling", method="stages").rounds == 2 * hops


def test_adding_up_over_devices() -> None:
    """mask="none": an all-reduce of the states."""
    found = cost("hla3", devices=4, mask="none")
    assert found.sent_bytes == found.backward_sent_bytes == 2 * 3 * (2 * D * D + D * DV) * 4 * HEADS // 4


def test_one_device() -> None:
    found = cost("hla2")
    assert (found.devices, found.rounds, found.sent_bytes, found.backward_sent_bytes) == (1, 0, 0, 0)
    assert found.device_bytes == 2 * (D + DV) * T * 4 * HEADS + found.state_bytes + found.activation_bytes


def test_a_devices_share() -> None:
    """A slice, its summary (S, C, F, with u = Sq for the last), and moving a state past 8 summaries: one product."""
    slices = -(-T // 8)
    alone, found = cost("hla2", T=slices), cost("hla2", devices=8)
    summary = 2 * (C * 2 * D + D * D) + 2 * (D * D + 2 * D * DV)
    assert found.flops == alone.flops + (summary * slices + 8 * 2 * D * D * DV) * HEADS
    assert found.device_bytes == alone.device_bytes + 8 * (FIELDS["hla2"] + 1) * 4 * HEADS
    assert found.activation_bytes == alone.activation_bytes
    assert found.traffic_bytes > alone.traffic_bytes
    assert found.backward_traffic_bytes > alone.backward_traffic_bytes
    assert (found.state_bytes, found.kv_cache_bytes, found.crossover) == (
        alone.state_bytes, cost("hla2").kv_cache_bytes, alone.crossover,
    )  # fmt: skip
    doubled = cost("hla2", devices=1024, exchange="doubling", T=1024 * slices)
    assert doubled.device_bytes == alone.device_bytes + 2 * (FIELDS["hla2"] + 1) * 4 * HEADS
    # ten combinations of S, C and F with one product each, after the first exchange, and the state's
    assert doubled.flops == alone.flops + (summary * slices + 11 * 2 * D * D * DV) * HEADS


def test_refused_options_of_devices() -> None:
    for options in (
        {"devices": 0}, {"devices": 2.0}, {"exchange": "ring"}, {"library": "numpy"}, {"method": "fused"},
        {"method": "segments", "definition": "as_printed"}, {"exchange": "doubling", "library": "torch"},
    ):  # fmt: skip
        with pytest.raises(hla.OptionError, match=next(iter(options))):
            cost("hla2", **options)


@pytest.mark.parametrize("d", [64, 128])
def test_traffic_in_bfloat16(d: int) -> None:
    """Bytes per token with chunks of 64: one pass of linear attention, HLA₂ in two passes that share u, AHLA in one."""
    expected = {"linear_attention": 12 * d + 4 * d * d // 64, "hla2": 16 * d + 4 * d * d // 64, "ahla": 8 * d}
    for operator, size in expected.items():
        found = hla.cost(operator, T=192, d=d, dv=d, heads=3, chunk_size=64, dtype="bfloat16")
        assert found.traffic_bytes == size * 192 * 3


def test_traffic_of_a_decode_step() -> None:
    """Each state is read and written once, in float32; beside them one token."""
    step = hla.cost("hla2", T=1, d=5, dv=7, heads=2, form="recurrent", dtype="float16")
    assert step.traffic_bytes == 2 * (2 * 4 * (5 * 5 + 5 * 7) + 2 * (2 * 5 + 2 * 7))


def test_traffic_of_unequal_widths() -> None:
    """By hand: k, v in and P out; q, k, v, P in and o out."""
    found = hla.cost("linear_attention", T=32, d=5, dv=7, chunk_size=16, dtype="float32")
    assert found.traffic_bytes == math.ceil(4 * (5 + 7 + 2 * 5 * 7 / 16 + 2 * 5 + 2 * 7)) * 32


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
def test_traffic_falls_with_longer_chunks_and_rises_backwards(operator: str) -> None:
    short, long = (hla.cost(operator, T=256, d=31, dv=29, chunk_size=size) for size in (16, 64))
    assert short.traffic_bytes >= long.traffic_bytes
    assert short.backward_traffic_bytes > long.backward_traffic_bytes > long.traffic_bytes
    scanned = hla.cost(operator, T=256, d=31, dv=29, chunk_size=64, form="scan")
    parallel = hla.cost(operator, T=4096, d=31, dv=29, form="parallel")
    assert scanned.traffic_bytes > long.traffic_bytes
    assert parallel.traffic_bytes > 2 * 4 * 4096**2
