"""States on disk: what is written, that it comes back, and that nothing else is taken for a state."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hla
from libraries import Library

TOKENS, HEADS, D, DV = 11, 3, 5, 7
NUMPY = Library("numpy")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear attention": ("linear_attention", {}),
    "linear attention normalize": ("linear_attention", {"normalize": True}),
    "hla2": ("hla2", {}),
    "hla2 normalize ridge": ("hla2", {"normalize": True, "ridge": 0.7}),
    "hla2 prefix": ("hla2", {"mask": "prefix"}),
    "hla2 prefix normalize ridge": ("hla2", {"mask": "prefix", "normalize": True, "ridge": 0.7}),
    "hla2 as printed": ("hla2", {"definition": "as_printed"}),
    "hla2 as printed normalize": ("hla2", {"definition": "as_printed", "normalize": True}),
    "ahla": ("ahla", {}),
    "ahla prefix normalize": ("ahla", {"mask": "prefix", "normalize": True}),
    "hla3": ("hla3", {}),
    "hla3 normalize": ("hla3", {"normalize": True}),
    "hla3 prefix": ("hla3", {"mask": "prefix"}),
    "hla3 as printed normalize": ("hla3", {"definition": "as_printed", "normalize": True}),
    "order 4": ("higher_order", {"order": 4}),
    "order 5 normalize": ("higher_order", {"order": 5, "normalize": True}),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def make_state(lib: Library, kind: tuple[str, dict[str, Any]], dtype: str = "float64", **more: Any) -> Any:
    operator, options = kind
    rng = np.random.default_rng(0)
    q, k, v = (lib.asarray(rng.normal(size=(HEADS, TOKENS, size)), dtype) for size in (D, D, DV))
    given_options = {**options, **more}
    if operator == "higher_order":
        return hla.higher_order(q, k, v, return_state=True, **given_options)[1]
    return getattr(hla, operator)(q, k, v, return_state=True, **given_options)[1]


def upper(x: Any) -> Any:
    """A symmetric matrix from its upper triangle alone."""
    return np.triu(x) + np.swapaxes(np.triu(x, 1), -1, -2)


def assert_same(lib: Library, got: Any, expected: Any) -> None:
    """Bit for bit, but for what packing loses: below the diagonal of symmetric fields."""
    assert type(got) is type(expected)
    for name, x in expected._asdict().items():
        y = getattr(got, name)
        assert y.dtype == x.dtype, name
        wanted = lib.numpy(x)
        if name in ("key_moment", "query_moment"):
            wanted = upper(wanted)
        np.testing.assert_array_equal(lib.numpy(y), wanted, err_msg=name)


# --- round trips -----------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_round_trip(lib: Library, tmp_path: Path, kind: tuple[str, dict[str, Any]], dtype: str) -> None:
    """To NumPy and back to the library, the device and the dtype."""
    state = make_state(lib, kind, dtype)
    path = tmp_path / "state"
    hla.save_state(path, state)
    host = hla.load_state(path)
    assert all(type(x) is np.ndarray for x in host)
    assert_same(NUMPY, host, type(state)(*(lib.numpy(x) for x in state)))
    for like in (state[0], lib.asarray(np.zeros(1), "float32"), lib.asarray(np.zeros(1), "float64")):
        back = hla.load_state(path, like=like)
        assert_same(lib, back, state)
        assert {type(x) for x in back} == {type(state[0])}
        if lib.device is not None:
            assert {str(x.device) for x in back} == {str(state[0].device)}


@every_kind
def test_a_loaded_state_goes_on(lib: Library, tmp_path: Path, kind: tuple[str, dict[str, Any]]) -> None:
    """Under its own options, also in place where arrays can be written to; under others it is refused."""
    state = make_state(lib, kind)
    hla.save_state(tmp_path / "state", state)
    loaded = hla.load_state(tmp_path / "state", like=state[0])
    _, options = kind
    rng = np.random.default_rng(1)
    token = [lib.asarray(rng.normal(size=(HEADS, size))) for size in (D, D, DV)]
    step_options = {**options, "eps": 10.0}
    o, _ = hla.step(state, *token, **step_options)
    p, _ = hla.step(loaded, *token, **step_options)
    np.testing.assert_allclose(lib.numpy(p), lib.numpy(o), rtol=1e-10, atol=1e-10)
    with pytest.raises(hla.OptionError, match=r"^initial_state: expected a state of "):
        hla.step(loaded, *token, **{**options, "normalize": not options.get("normalize", False)})
    if lib.name != "jax":
        p, same = hla.step(loaded, *token, **step_options, inplace=True)
        assert same is loaded
        np.testing.assert_allclose(lib.numpy(p), lib.numpy(o), rtol=1e-10, atol=1e-10)


def test_batch_axes_stay(tmp_path: Path) -> None:
    """Of grouped heads (size-1 axes of keys), packed sequences, no batch, an empty batch."""
    like = np.zeros(1)
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(HEADS, TOKENS, size)) for size in (D, D, DV))
    states = [
        hla.init_state("hla2", batch=(HEADS, 2), kv_batch=(HEADS, 1), d=D, dv=DV, like=like, normalize=True),
        hla.hla2(q, k, v, cu_seqlens=np.asarray([0, 4, 4, 11]), return_state=True)[1],
        hla.init_state("hla2", batch=(), d=D, dv=DV, like=like),
        hla.init_state("hla2", batch=(0, 2), d=D, dv=DV, like=like),
        hla.init_state("hla3", batch=(2,), d=1, dv=1, like=like),
    ]
    for state in states:
        hla.save_state(tmp_path / "state", state)
        assert_same(NUMPY, hla.load_state(tmp_path / "state"), state)


@pytest.mark.parametrize("make", [str, Path, os.fspath], ids=["str", "Path", "fspath"])
def test_kinds_of_path(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    state = make_state(NUMPY, KINDS["hla2"])
    path = make(tmp_path / "a state.safetensors")
    hla.save_state(path, state)
    assert_same(NUMPY, hla.load_state(path), state)


def test_a_state_with_gradients(lib: Library, tmp_path: Path) -> None:
    """Values are written; the graph is not, and is not needed."""
    if lib.name != "torch":
        pytest.skip("autograd: in the session of torch")
    x = lib.asarray(np.ones((TOKENS, D))).requires_grad_()
    _, state = hla.hla2(x, x, x, return_state=True)
    assert state.key_moment.requires_grad
    hla.save_state(tmp_path / "state", state)
    assert not hla.load_state(tmp_path / "state", like=x).key_moment.requires_grad


def test_a_dtype_that_the_library_lacks(lib: Library, tmp_path: Path) -> None:
    """The dtype stays as saved, or it is an error; never a silent rounding."""
    if lib.name != "jax":
        pytest.skip("jax without x64: in the session of jax")
    import jax

    hla.save_state(tmp_path / "wide", make_state(NUMPY, KINDS["hla2"]))
    narrow = make_state(NUMPY, KINDS["hla2"], "float32")
    hla.save_state(tmp_path / "narrow", narrow)
    with jax.enable_x64(False) if hasattr(jax, "enable_x64") else jax.experimental.disable_x64():
        like = jax.numpy.zeros(1)
        with pytest.raises(
            hla.DTypeError, match=r"^like: expected a library that holds float64, as saved, got JAX wit"
        ):
            hla.load_state(tmp_path / "wide", like=like)
        assert_same(lib, hla.load_state(tmp_path / "narrow", like=like), lib.tree(narrow))


# --- what is in the file ---------------------------------------------------------------------------------------------


def read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """A safetensors header and where the data starts: 8 bytes of length, then JSON."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), 8 + size


def test_symmetric_fields_are_packed(tmp_path: Path) -> None:
    hla.save_state(tmp_path / "state", make_state(NUMPY, KINDS["hla3 prefix"], "float32"))
    data = (tmp_path / "state").read_bytes()
    header, start = read_header(data)
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    half = D * (D + 1) // 2
    assert shapes == {
        "key_moment": [HEADS, half],
        "query_moment": [HEADS, half],
        "key_value_moment": [HEADS, D, DV],
    }
    assert len(data) - start == 4 * HEADS * (2 * half + D * DV)


def test_other_readers_can_read_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    state = make_state(NUMPY, KINDS["ahla"])
    hla.save_state(tmp_path / "state", state)
    found = load_file(tmp_path / "state")
    assert set(found) == set(state._fields)
    np.testing.assert_array_equal(found["cascade_state"], state.cascade_state)


def test_metadata(tmp_path: Path) -> None:
    hla.save_state(tmp_path / "state", make_state(NUMPY, KINDS["hla2 prefix normalize ridge"]))
    metadata = read_header((tmp_path / "state").read_bytes())[0]["__metadata__"]
    assert metadata["format"] == "hla-state"
    assert metadata["version"] == "1"
    operator = json.loads(metadata["operator"])
    assert operator == {
        "operator": "hla2",
        "mask": "prefix",
        "definition": "exact",
        "order": 0,
        "normalize": True,
        "ridge": True,
    }


# --- all or nothing --------------------------------------------------------------------------------------------------


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    first, second = make_state(NUMPY, KINDS["hla2"]), make_state(NUMPY, KINDS["ahla"])
    for state in (first, second):
        hla.save_state(tmp_path / "state", state)
        assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert_same(NUMPY, hla.load_state(tmp_path / "state"), second)


@pytest.mark.parametrize("step", ["replace", "write"])
def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """And nothing else: neither half a file nor a temporary one."""
    state = make_state(NUMPY, KINDS["hla2"])
    hla.save_state(tmp_path / "state", state)
    before = (tmp_path / "state").read_bytes()
    real = Path.write_bytes

    def on_a_full_disk(self: Path, data: bytes) -> int:
        real(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(13, "Permission denied")

    if step == "write":
        monkeypatch.setattr(Path, "write_bytes", on_a_full_disk)
    else:
        monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"No space left|Permission denied"):
        hla.save_state(tmp_path / "state", make_state(NUMPY, KINDS["ahla"]))
    monkeypatch.undo()
    assert (tmp_path / "state").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_no_such_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hla.save_state(tmp_path / "nowhere" / "state", make_state(NUMPY, KINDS["hla2"]))
    with pytest.raises(FileNotFoundError):
        hla.load_state(tmp_path / "state")


@pytest.mark.parametrize("value", [None, np.ones((5, 5)), (np.ones((5, 5)), np.ones((5, 7))), {"key_moment": 1}])
def test_only_states_are_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        hla.DTypeError, match=r"^state: expected a state, got \w+\. Use return_state=True or init_state"
    ):
        hla.save_state(tmp_path / "state", value)
    assert not list(tmp_path.iterdir())


# --- damaged, foreign, wrong -----------------------------------------------------------------------------------------

MESSAGE = r"^path: expected a state written by hla\.save_state, got {name}: .+\. Save the state again\.$"


def loads_or_refuses(path: Path, data: bytes, original: Any) -> bool:
    """Whether the bytes load, then as the very state; anything but that or the ValueError of the contract fails."""
    path.write_bytes(data)
    refusal = None
    try:
        found = hla.load_state(path)
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        assert_same(NUMPY, found, original)
        return True
    assert refusal.startswith(f"path: expected a state written by hla.save_state, got {path}: ")
    return False


@pytest.mark.parametrize("name", ["linear attention normalize", "hla2", "hla3 as printed normalize", "order 4"])
def test_every_truncation(tmp_path: Path, name: str) -> None:
    state = make_state(NUMPY, KINDS[name], "float32")
    path = tmp_path / "state"
    hla.save_state(path, state)
    data = path.read_bytes()
    start = read_header(data)[1]
    for size in {*range(start + 9), *range(start, len(data), 41), len(data) - 1}:
        assert not loads_or_refuses(path, data[:size], state), size
    assert not loads_or_refuses(path, data + b"\0", state)
    assert loads_or_refuses(path, data, state)


@pytest.mark.parametrize(("name", "bits"), [("hla2", range(8)), ("linear attention normalize", (0, 5))])
def test_every_bit_of_the_header(tmp_path: Path, name: str, bits: Sequence[int]) -> None:
    """A flipped bit in length, names, shapes, offsets or options is noticed, or of no effect."""
    state = make_state(NUMPY, KINDS[name], "float32")
    path = tmp_path / "state"
    hla.save_state(path, state)
    data = path.read_bytes()
    harmless = 0
    for place in range(read_header(data)[1]):
        for bit in bits:
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            harmless += loads_or_refuses(path, bytes(changed), state)
    assert harmless < 20


def test_any_bytes(tmp_path: Path) -> None:
    """Overwritten pieces, of the header and of the data before it."""
    state = make_state(NUMPY, KINDS["hla2"], "float32")
    path = tmp_path / "state"
    hla.save_state(path, state)
    data = path.read_bytes()
    start = read_header(data)[1]

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, start - 1), st.binary(min_size=1, max_size=12))
    def check(place: int, piece: bytes) -> None:
        stop = min(place + len(piece), start)
        loads_or_refuses(path, data[:place] + piece[: stop - place] + data[stop:], state)

    check()


def write(path: Path, tensors: dict[str, Any], metadata: Any, **entries: Any) -> None:
    """A safetensors file by hand, so that it may say anything; `entries` replace those of tensors."""
    blob, header, offset = b"", {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        raw = np.ascontiguousarray(x).tobytes()
        kind = {"float32": "F32", "float64": "F64", "float16": "F16", "int32": "I32", "complex64": "C64"}[x.dtype.name]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        blob += raw
    for name, entry in entries.items():
        header[name] = {**header.get(name, {}), **entry} if entry is not None else None
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


PLAIN = {
    "operator": "hla2",
    "mask": "causal",
    "definition": "exact",
    "order": 0,
    "normalize": False,
    "ridge": False,
}


def marks(**changed: Any) -> dict[str, str]:
    return {"format": "hla-state", "version": "1", "operator": json.dumps({**PLAIN, **changed})}


def tensors(**changed: Any) -> dict[str, Any]:
    plain = {"key_moment": np.ones((3, 15), np.float32), "corrected_state": np.ones((3, 5, 7), np.float32)}
    return {name: x for name, x in {**plain, **changed}.items() if x is not None}


def f32(*shape: int) -> Any:
    return np.ones(shape, np.float32)


WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another program's file": (tensors(), {"format": "pt"}, "without the mark of a state"),
    "no metadata at all": (tensors(), {}, "without the mark of a state"),
    "metadata that are null": (tensors(), None, "."),
    "a later version": (tensors(), {**marks(), "version": "2"}, "format version 2, this release reads 1"),
    "no version": (tensors(), {"format": "hla-state"}, "format version None, this release reads 1"),
    "no operator": (tensors(), {"format": "hla-state", "version": "1"}, "no known operator"),
    "an operator that is no JSON": (tensors(), {**marks(), "operator": "hla2"}, "no known operator"),
    "an operator that is a list": (tensors(), {**marks(), "operator": "[1]"}, "no known operator"),
    "an operator that is null": (tensors(), {**marks(), "operator": "null"}, "no known operator"),
    "an unknown operator": (tensors(), marks(operator="hla9"), "no known operator"),
    "an unknown mask": (tensors(), marks(mask="casual"), "no known operator"),
    "a mask that is a list": (tensors(), marks(mask=["causal"]), "no known operator"),
    "options that exclude each other": (tensors(), marks(mask="prefix", definition="as_printed"), "no known operator"),
    "no state of a bidirectional operator": (tensors(), marks(mask="none"), "no known operator"),
    "an order where there is none": (tensors(), marks(order=2), "no known operator"),
    "an order that has a name": (tensors(), marks(operator="higher_order", order=2), "no known operator"),
    "an order that is no integer": (tensors(), marks(operator="higher_order", order=4.0), "no known operator"),
    "an unknown option": (tensors(), marks(colour="red"), "no known operator"),
    "a field too few": (tensors(corrected_state=None), marks(), r"fields \['key_moment'\], expected"),
    "a field too many": (tensors(key_mass=f32(3, 5)), marks(), "fields "),
    "fields of other options": (tensors(), marks(normalize=True), "fields "),
    "16-bit fields": ({name: x.astype(np.float16) for name, x in tensors().items()}, marks(), "in float16"),
    "integer fields": ({name: x.astype(np.int32) for name, x in tensors().items()}, marks(), "in int32"),
    "two dtypes": (tensors(corrected_state=np.ones((3, 5, 7))), marks(), "fields of different dtypes"),
    "a triangle that is none": (tensors(key_moment=f32(3, 14)), marks(), "no packed symmetric matrix"),
    "a triangle of nothing": (tensors(key_moment=f32(3, 0)), marks(), "no packed symmetric matrix"),
    "a triangle without axes": (tensors(key_moment=f32()), marks(), "no packed symmetric matrix"),
    "two d": (tensors(key_moment=f32(3, 10)), marks(), r"expected last axes"),
    "two d and transposed": (tensors(corrected_state=f32(3, 7, 5)), marks(), r"expected last axes"),
    "too few axes": (tensors(corrected_state=f32(7)), marks(), "too few axes"),
    "batch axes that do not fit": (tensors(corrected_state=f32(2, 5, 7)), marks(), "batch axes"),
    "more batches of keys than of states": (tensors(corrected_state=f32(1, 5, 7)), marks(), "batch axes"),
    "no values": (tensors(corrected_state=f32(3, 5, 0)), marks(), "."),
    "two dv": (
        {"key_moment": f32(15), "corrected_state": f32(5, 7), "corrected_state_2": f32(5, 6)},
        marks(operator="higher_order", order=4),
        "expected last axes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(tmp_path: Path, name: str) -> None:
    """Each is a ValueError that names the file and says what is wrong."""
    path = tmp_path / "state"
    content, metadata, words = WRONG[name]
    write(path, content, metadata)
    with pytest.raises(
        ValueError, match=r"^path: expected a state written by hla\.save_state, got .*" + words
    ) as found:
        hla.load_state(path)
    assert type(found.value) is ValueError
    assert str(path) in str(found.value)
    assert str(found.value).endswith("Save the state again.")


def test_the_good_file_by_hand(tmp_path: Path) -> None:
    """The one that the wrong ones differ from."""
    write(tmp_path / "state", tensors(), marks())
    state = hla.load_state(tmp_path / "state")
    assert state._fields == ("key_moment", "corrected_state")
    assert state.key_moment.shape == (3, 5, 5)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "BOOL", "U8", "C64", "NEW"])
def test_dtypes_of_others(tmp_path: Path, dtype: str) -> None:
    size = {"BF16": 2, "F8_E4M3": 1, "BOOL": 1, "U8": 1, "C64": 8, "NEW": 4}[dtype] * 35
    entry = {"dtype": dtype, "shape": [5, 7], "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": marks(operator="linear_attention"), "key_value_moment": entry}).encode()
    (tmp_path / "state").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(ValueError, match=MESSAGE.format(name=".*")):
        hla.load_state(tmp_path / "state")


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 8, b"\xff" * 64, b"PK\x03\x04" + bytes(60), b"{}" * 40])
def test_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file, or damaged"):
        hla.load_state(tmp_path / "state")


@pytest.mark.parametrize("like", [[1.0], 1.0, "torch", object()])
def test_like_is_an_array(tmp_path: Path, like: Any) -> None:
    hla.save_state(tmp_path / "state", make_state(NUMPY, KINDS["hla2"]))
    with pytest.raises(hla.DTypeError, match=r"^like: expected an array of .*, got [\w.]+\. "):
        hla.load_state(tmp_path / "state", like=like)


# --- symmetric matrices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 5, 11])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3), (0,)], ids=str)
def test_pack_and_unpack(lib: Library, d: int, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(d)
    x = rng.normal(size=(*batch, d, d))
    S = x + x.swapaxes(-1, -2)
    packed = hla.pack_symmetric(lib.asarray(S))
    np.testing.assert_array_equal(lib.numpy(packed), S[..., *np.triu_indices(d)])
    assert tuple(packed.shape) == (*batch, d * (d + 1) // 2)
    back = hla.unpack_symmetric(packed)
    np.testing.assert_array_equal(lib.numpy(back), S)
    assert back.dtype == packed.dtype == lib.dtype("float64")


def test_packing_reads_the_upper_triangle_only(lib: Library) -> None:
    x = np.arange(9.0).reshape(3, 3)
    spoilt = np.where(np.tri(3, 3, -1, dtype=bool), np.nan, x)
    assert lib.numpy(hla.pack_symmetric(lib.asarray(spoilt))).tolist() == [0, 1, 2, 4, 5, 8]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_packing_keeps_the_dtype(lib: Library, dtype: str) -> None:
    if dtype not in (*lib.floats, "int32"):
        pytest.skip(f"{lib.name} has no {dtype}")
    if (lib.name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes")
    x = lib.asarray(np.ones((3, 3)), dtype)
    packed = hla.pack_symmetric(x)
    assert packed.dtype == hla.unpack_symmetric(packed).dtype == x.dtype


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 2)], ids=str)
def test_no_square_matrices(lib: Library, shape: tuple[int, ...]) -> None:
    x = lib.asarray(np.ones((2, *shape)))[0, ...]
    with pytest.raises(hla.ShapeError, match=r"^S: expected square matrices \(\*batch, d, d\), got shape .*\. "):
        hla.pack_symmetric(x)


@pytest.mark.parametrize("shape", [(), (0,), (2,), (3, 5)], ids=str)
def test_no_triangular_number(lib: Library, shape: tuple[int, ...]) -> None:
    x = lib.asarray(np.ones((2, *shape)))[0, ...]
    with pytest.raises(hla.ShapeError, match=r"^x: expected a last axis of size d\(d\+1\)/2, got shape .*\. "):
        hla.unpack_symmetric(x)


@pytest.mark.parametrize("function", [hla.pack_symmetric, hla.unpack_symmetric])
def test_no_array(function: Callable[[Any], Any]) -> None:
    with pytest.raises(hla.DTypeError, match=r"^[Sx]: expected an array of .*, got builtins\.list\. "):
        function([[1.0]])
