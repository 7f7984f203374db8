r"""Memory traffic: the numbers that one pass has to move, per token and head. Small products are bound by it on a GPU.

Counted as if every array crossed the memory once for each pass over the tokens that uses it. Chunkwise, a state is a
pass (its two streams in; the state out, once every C tokens), and a read is another (three streams and the state in,
the result out). Linear attention thus moves 3(d + dv) + 2·d·dv/C numbers. A state that takes the result of the read
before it shares one pass with both (`hla.backends.triton`), so that HLA₂ moves 5d + 3dv + 2·d·dv/C; where the last read
needs nothing else, it runs there too, and AHLA moves 2d + 2dv. Backwards, states and results are made again, each read
has a pass backwards in time, and each stream's gradient a pass over all chunks.
"""

from __future__ import annotations

from typing import NamedTuple

from hla.family import Program, Read, Shapes, State, shapes, steps


class Numbers(NamedTuple):
    """Moved per token: those of streams and of states between chunks, and those of states in full precision."""

    stored: float
    accumulated: float = 0.0


def forward(program: Program, d: int, dv: int, chunk: int, form: str, length: int) -> Numbers:
    """Of the forward pass in a form."""
    sizes = shapes(program, (), (), (), d, dv)
    outside = 2 * d + 2 * dv  # q, k, v and the output
    states = sum(shape[-2] * shape[-1] for shape in sizes.state.values())
    if form == "recurrent":  # every token reads and writes the states
        return Numbers(outside, 2 * states)
    if form == "parallel":  # a square of pairs for each read, written and read again
        return Numbers(outside + 2 * length * len(program.reads))
    moved = _passes(program, sizes, chunk, keep=False)
    if form == "scan":  # summaries of the segments, and about two combinations of three states each
        return Numbers(moved, 8 * states / chunk)
    return Numbers(moved)


def backward(program: Program, d: int, dv: int, chunk: int) -> Numbers:
    """Of the gradient, chunkwise, with what it computes again."""
    sizes = shapes(program, (), (), (), d, dv)
    width, total = sizes.width, float(_passes(program, sizes, chunk, keep=True))
    terms: dict[tuple[str, bool], set[str]] = {}
    for state, read in _read_states(program):
        size = width[state.key] * width[state.value] / chunk
        d_read = f"d {read.result}"
        total += width[read.query] + width[read.result] + size  # the state's cotangent, from the right
        for name, reverse, others in (
            (read.query, False, {d_read, state.key, state.value}),
            (state.key, True, {d_read, read.query, state.value}),
            (state.value, True, {d_read, read.query, state.key}),
        ):
            if name != "one":
                terms.setdefault((name, reverse), set()).update(others)
                total += size
    wide = {**width, **{f"d {name}": n for name, n in width.items()}}
    return Numbers(total + sum(sum(wide[x] for x in others) + width[name] for (name, _), others in terms.items()))


def successor(program: Program, result: str, known: set[str], ran: set[str]) -> State | None:
    """The state that takes a read's result and has its other stream already."""
    for state in program.states:
        if state.symbol in ran or (state.key == result) == (state.value == result):
            continue
        if (state.value if state.key == result else state.key) in known:
            return state
    return None


def last_read(program: Program, read: Read, following: State) -> Read | None:
    """The read of that state, if it alone is the output and multiplies the pairs of tokens that `read` does."""
    if len(program.output) != 1 or program.denominator or program.output[0][1] != 1.0:
        return None
    reads = [r for r in program.reads if r.state == following.symbol]
    uses = sum(read.result in (s.key, s.value) for s in program.states)
    uses += sum(r.query == read.result for r in program.reads)
    if len(reads) != 1 or uses != 1 or reads[0].result != program.output[0][0] or reads[0].strict:
        return None
    same = reads[0].query == read.query and following.key == program.state(read.state).key
    return reads[0] if same and following.value == read.result else None


def _read_states(program: Program) -> list[tuple[State, Read]]:
    return [(line.state, line.read) for line in steps(program) if line.read is not None]


def _passes(program: Program, sizes: Shapes, chunk: int, *, keep: bool) -> float:
    """Numbers of all passes; `keep`: of those that the gradient makes again, without the output."""
    width = sizes.width
    final = {name for name, _ in (*program.output, *program.denominator)}
    known, ran, done = {"q", "k", "v", "one"}, set[str](), set[str]()
    total = 0.0

    def size(state: State) -> float:
        return width[state.key] * width[state.value] / chunk

    def streams(*names: str) -> int:
        return sum(width[name] for name in set(names) if name != "one")

    for symbol, state, read in steps(program):
        fused = read is not None and not read.strict and read.result not in final and symbol not in ran
        following = successor(program, read.result, known, {*ran, symbol}) if fused and read is not None else None
        if following is not None and read is not None:
            last = None if keep else last_read(program, read, following)
            total += streams(read.query, state.key, state.value, *({following.key, following.value} - {read.result}))
            total += width[read.result] + size(following) if last is None else width[last.result]
            total += size(state) if keep else 0
            ran |= {symbol, following.symbol}
            done |= {read.result, *([] if last is None else [last.result])}
        elif symbol not in ran:
            total += streams(state.key, state.value) + size(state)
            ran.add(symbol)
        if read is not None and read.result not in done and not (keep and read.result in final):
            total += streams(read.query, state.key, state.value) + size(state) + width[read.result]
            done.add(read.result)
        if read is not None:
            known.add(read.result)
    return total
