"""Products of 32 x 32 blocks, written in LLVM's own code, for compiled loops. No torch.

`block` multiplies rows with 32 columns of a weight. The rows' dtype picks the instruction:

    uint8    AVX-512 VNNI   4 products of 8 bits a lane (vpdpbusd)
    int8     AMX            the same bytes as uint8; 16 x 16 x 64 products an instruction (tdpbusd)
    int16    AVX2           2 products of 16 bits a lane (vpmaddwd); numbers of 8 bits, 0 to 255
    uint16   AMX, AVX-512   bf16: 16 x 16 x 32 products (tdpbf16ps), or 2 a lane (vdpbf16ps)
    float32  any processor  fused multiply-add

Integer products are exact: all three give the same sums. A weight is packed so that each
instruction finds its operands side by side, see `packed`.

Letters: M rows, N columns, K inputs, G inputs that an instruction takes of a column at once.
"""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic
from numba.np import arrayobj

from bertsmith.base.jit import compiled

COLUMNS, ROWS = 32, 32  # of a block
GROUP = {"uint8": 4, "int8": 4, "int16": 2, "uint16": 2, "float32": 1}  # G by the rows' dtype
LANES = 16  # 32-bit numbers of a vector, as code below has them; narrow registers take several
LINE = 64  # bytes of a line of the cache, and of a tile's row: with AMX rows of a are multiples
BYTE, INT, WIDE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT, SHORT, NOTHING = ir.FloatType(), ir.IntType(16), ir.VoidType()
INTEGERS = ir.VectorType(INT, LANES)
POINTER = BYTE.as_pointer()
ADDRESS = types.CPointer(types.int8)
binding.initialize_native_asmparser()  # some instructions are written as such
WORD, NUMBER, WORDS = types.int64, types.float32, types.UniTuple(types.int64, 2)
TWO, THREE = types.UniTuple(ADDRESS, 2), types.UniTuple(ADDRESS, 3)
PAIR = types.Tuple((ADDRESS, WORD))
ANY, LITERAL = "any", "literal"  # kinds of arguments for `emitted`
typed_code: Any = intrinsic  # a function that is given types, and returns a signature and code


@cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what this processor can do."""
    with suppress(RuntimeError):  # LLVM cannot ask every kind of processor
        return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)
    return frozenset()


@cache
def integer_dtype(*inputs: int) -> np.dtype | None:
    """The dtype of rows, of such lengths, whose products are quickest in integers here, or None."""
    features = cpu_features()
    in_lines = all(size % LINE == 0 for size in inputs)
    if in_lines and "amx-int8" in features and _amx_allowed():
        return np.dtype(np.int8)
    if "avx512vnni" in features:
        return np.dtype(np.uint8)
    return np.dtype(np.int16) if "avx2" in features else None


@cache
def has_bf16_blocks() -> bool:
    """True if this processor multiplies bf16; asks for the tiles first, which code may have."""
    return _has_bf16_tiles() or "avx512bf16" in cpu_features()


def has_bf16_vectors() -> bool:
    """True if `block` multiplies bf16 here, and not in tiles."""
    return has_bf16_blocks() and not _has_bf16_tiles()


def _has_bf16_tiles() -> bool:
    return "amx-bf16" in cpu_features() and _amx_allowed()


@cache
def _amx_allowed() -> bool:
    """Ask Linux for the tile registers, which a process has to request (arch_prctl)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def packed(weight: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A weight [N, K] for `block` with rows of `dtype`: flat, 32 columns after another.

    Of 32 columns all inputs follow one another in groups of G: [N / 32, K / G, 32, G].
    """
    group = GROUP[dtype.name]
    columns, inputs = weight.shape
    assert columns % COLUMNS == 0 and inputs % group == 0, weight.shape
    parts = weight.reshape(columns // COLUMNS, COLUMNS, inputs // group, group)
    return np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).reshape(-1)


def in_tiles(dtype: Any) -> bool:
    """True if `block` multiplies rows of that dtype in AMX's tiles."""
    return str(dtype) == "int8" or str(dtype) == "uint16" and _has_bf16_tiles()


def int64(number: int) -> ir.Constant:
    return ir.Constant(WIDE, number)


def declared(module: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A function of LLVM's, or an instruction of the processor, by its name."""
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


def emitted(result: Any, *kinds: Any) -> Any:
    """Make a function for compiled loops of one that writes its code, for arguments of these types.

    That one is given a builder and the arguments' values, of a tuple a list of those inside; of
    ANY array its dtype, of ANY None None, of a LITERAL what it says.
    """

    def known(builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.UniTuple | types.Tuple):
            parts = enumerate(kind.types)
            return [known(builder, own, builder.extract_value(value, n)) for n, own in parts]
        if isinstance(kind, types.Array):
            return kind.dtype
        if isinstance(kind, types.Literal):
            return kind.literal_value
        return None if kind == types.none else value

    def made(write: Any) -> Any:
        @wraps(write)
        def typed(_: Any, *given: Any) -> Any:
            taken = []
            for kind, own in zip(kinds, given, strict=True):
                if kind == LITERAL and not isinstance(own, types.Literal):
                    raise errors.RequireLiteralValue(write.__name__)
                taken.append(own if kind in (ANY, LITERAL) else kind)

            def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                pairs = zip(signature.args, arguments, strict=True)
                found = write(builder, *(known(builder, *pair) for pair in pairs))
                if isinstance(found, tuple):
                    return context.make_tuple(builder, signature.return_type, found)
                return context.get_dummy_value() if found is None else found

            return result(*taken), code

        return typed_code(typed)

    return made


@typed_code
def address(context, array, element):
    """The address of an element, by its number, of a contiguous array."""

    def code(context, builder, signature, arguments):
        data = arrayobj.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.bitcast(builder.gep(data, [arguments[1]]), POINTER)

    return ADDRESS(array, types.int64), code


@emitted(types.void, ANY, ADDRESS, WORD, ADDRESS, WORD, ADDRESS, WORD, WORD, WORD)
def block(builder, dtype, a, a_step, b, b_step, c, c_step, groups, rows):
    """c[M, 32] = a[M, K] b[K, 32], M = `rows` rounded up to a multiple of 8 (AMX: of 16).

    The first argument is the array of the rows, for its dtype. Steps are bytes: from row to row of
    a and c, and in b from a group of G inputs to the next, `groups` in all. c is int32, for float32
    and bf16 float32.
    """
    if in_tiles(dtype):
        _tile_block(dtype)(builder, a, a_step, b, b_step, c, c_step, groups, rows)
    else:
        vector_block(dtype, stored(c, c_step))(builder, a, a_step, b, b_step, groups, rows)


@emitted(types.void, ANY)
def begin(builder, dtype):
    """Ready a thread for `block` with rows of the dtype of an array."""
    if in_tiles(dtype):
        configuration = bytearray(64)  # palette 1; 8 tiles of 16 rows of 64 bytes
        configuration[0] = 1
        configuration[16:32:2] = bytes([64] * 8)
        configuration[48:56] = bytes([16] * 8)
        place = cgutils.alloca_once_value(builder, cgutils.make_bytearray(configuration))
        load = declared(builder.module, "llvm.x86.ldtilecfg", NOTHING, [POINTER])
        builder.call(load, [builder.bitcast(place, POINTER)])


@emitted(types.void, ANY)
def end(builder, dtype):
    """Free what `begin` took."""
    if in_tiles(dtype):
        builder.call(declared(builder.module, "llvm.x86.tilerelease", NOTHING, []), [])


@emitted(types.void, ADDRESS, WORD)
def meet(builder, arrived, count):
    """Add one to an int64 at an address, which threads share, and wait until it is `count`."""
    place = builder.bitcast(arrived, WIDE.as_pointer())
    builder.atomic_rmw("add", place, int64(1), "seq_cst")
    waiting, done = (builder.append_basic_block(name) for name in ("waiting", "done"))
    builder.branch(waiting)
    builder.position_at_end(waiting)
    if platform.system() != "Windows":  # a core may be needed by the thread that is waited for
        builder.call(declared(builder.module, "sched_yield", INT, []), [])
    seen = builder.load_atomic(place, "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", seen, count), waiting, done)
    builder.position_at_end(done)


def stored(c: Any, c_step: Any) -> Any:
    """Code for `vector_block` that stores its sums, rows `c_step` bytes apart."""

    def finish(builder: Any, sums: Any, first: Any, column: int) -> None:
        for r, row in enumerate(sums):
            target = builder.gep(c, [builder.mul(c_step, builder.add(first, int64(r)))])
            for n, value in enumerate(row):
                place = builder.gep(target, [int64(4 * (column + LANES * n))])
                builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)

    return finish


def vector_block(dtype: Any, finish: Any) -> Any:
    """Code for sums in vector registers; as many at once as the processor has room for.

    `finish`(builder, sums, row, column) is given the sums of rows from `row` on, for each a list of
    vectors of LANES columns from `column` on: rows up to a multiple of 8, as `block`.
    """
    is_wide = "avx512f" in cpu_features() and dtype != types.int16
    lanes, heights = (LANES, (8,)) if is_wide else (LANES // 2, (6, 4))
    number = FLOAT if dtype in (types.float32, types.uint16) else INT
    vector = ir.VectorType(number, lanes)
    group = GROUP[dtype.name]
    taken = group * dtype.bitwidth // 8  # bytes of a row
    narrow = taken if dtype != types.int16 else group  # bytes of a column of the weight
    unroll = 4

    def spread(builder: Any, place: Any) -> Any:
        """The next G inputs of a row in every lane."""
        as_number = builder.load(builder.bitcast(place, number.as_pointer()), align=1)
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, as_number, ir.Constant(INT, 0))
        zeros = ir.Constant(ir.VectorType(INT, lanes), [0] * lanes)
        return builder.shuffle_vector(first, undefined, zeros)

    def weights(builder: Any, place: Any) -> Any:
        """The next G inputs of `lanes` columns."""
        if dtype != types.int16:
            return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)
        pairs = ir.VectorType(BYTE, 2 * lanes)
        numbers = builder.load(builder.bitcast(place, pairs.as_pointer()), align=1)
        return builder.sext(numbers, ir.VectorType(SHORT, 2 * lanes))

    def multiply_add(builder: Any, total: Any, x: Any, w: Any) -> Any:
        if dtype == types.float32:
            name = f"llvm.fma.v{lanes}f32"
            return builder.call(declared(builder.module, name, vector, [vector] * 3), [x, w, total])
        if dtype == types.int16:
            pairs = ir.VectorType(SHORT, 2 * lanes)
            add = declared(builder.module, "llvm.x86.avx2.pmadd.wd", vector, [pairs, pairs])
            return builder.add(total, builder.call(add, [builder.bitcast(x, pairs), w]))
        if dtype == types.uint16:  # in assembly, as llvmlite has no name for bf16
            kind = ir.FunctionType(vector, [vector] * 3)
            code = ir.InlineAsm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0")
            return builder.call(code, [w, x, total])
        # LLVM 22 gave the operands of bytes their own type
        operand = ir.VectorType(BYTE, 64) if binding.llvm_version_info[0] >= 22 else vector
        name = "llvm.x86.avx512.vpdpbusd.512"
        dot = declared(builder.module, name, vector, [vector, operand, operand])
        return builder.call(dot, [total, builder.bitcast(x, operand), builder.bitcast(w, operand)])

    def part(builder: Any, height: int, a: Any, b: Any, where: Any, n: Any):
        """`height` rows times 2 x `lanes` columns, over `n` groups of inputs."""
        (a, a_step), (b, b_step), (first, column) = a, b, where
        zero = ir.Constant(vector, [0] * lanes)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in "ab"] for _ in range(height)]
        a_rows = [builder.gep(a, [builder.mul(a_step, int64(r))]) for r in range(height)]

        def step(k: Any) -> None:
            place = builder.gep(b, [builder.mul(k, b_step)])
            both = [
                weights(builder, builder.gep(place, [int64(lanes * narrow * v)])) for v in (0, 1)
            ]
            for row, total in zip(a_rows, totals, strict=True):
                x = spread(builder, builder.gep(row, [builder.mul(k, int64(taken))]))
                for w, one in zip(both, total, strict=True):
                    builder.store(multiply_add(builder, builder.load(one), x, w), one)

        whole = builder.sdiv(n, int64(unroll))
        with cgutils.for_range(builder, whole) as loop:
            for extra in range(unroll):
                k = builder.mul(loop.index, int64(unroll))
                step(builder.add(k, int64(extra)))
        done = builder.mul(whole, int64(unroll))
        with cgutils.for_range(builder, builder.sub(n, done)) as loop:
            step(builder.add(done, loop.index))
        sums = [[builder.load(total) for total in row] for row in totals]
        if not is_wide:
            every = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
            sums = [[builder.shuffle_vector(*row, every)] for row in sums]
        finish(builder, sums, first, column)

    def make(builder, a, a_step, b, b_step, groups, rows):
        eights = builder.sdiv(builder.add(rows, int64(7)), int64(8))
        done, rows = int64(0), builder.mul(eights, int64(8))
        for height in heights:
            at_once = 12 if height == 6 else height  # sixes come in pairs, so that fours are left
            times = builder.sdiv(builder.sub(rows, done), int64(at_once))
            times = builder.mul(times, int64(at_once // height))
            with cgutils.for_range(builder, times) as loop:
                first = builder.add(done, builder.mul(loop.index, int64(height)))
                own_a = builder.gep(a, [builder.mul(first, a_step)])
                for column in range(0, COLUMNS, 2 * lanes):
                    own_b = builder.gep(b, [int64(column * narrow)]), b_step
                    part(builder, height, (own_a, a_step), own_b, (first, column), groups)
            done = builder.add(done, builder.mul(times, int64(height)))

    return make


def finished_block(dtype: Any, finish: Any) -> Any:
    """Code for sums that `finish` is given, see `vector_block`; those of tiles go through memory.

    It is told an address with room for them, 32 x 32 of 4 bytes.
    """

    def make(builder, a, a_step, b, b_step, sums, groups, rows):
        if not in_tiles(dtype):
            vector_block(dtype, finish)(builder, a, a_step, b, b_step, groups, rows)
            return
        step = int64(4 * COLUMNS)
        _tile_block(dtype)(builder, a, a_step, b, b_step, sums, step, groups, rows)
        vector = ir.VectorType(FLOAT if dtype == types.uint16 else INT, LANES)
        with cgutils.for_range(builder, rows) as loop:
            line = builder.gep(sums, [builder.mul(loop.index, step)])
            halves = (builder.gep(line, [int64(4 * LANES * half)]) for half in (0, 1))
            places = [builder.bitcast(half, vector.as_pointer()) for half in halves]
            finish(builder, [[builder.load(place, align=1) for place in places]], loop.index, 0)

    return make


def _tile_block(dtype: Any) -> Any:
    """Code for sums in tiles."""
    name = f"llvm.x86.{'tdpbusd' if dtype == types.int8 else 'tdpbf16ps'}"

    def make(builder, a, a_step, b, b_step, c, c_step, groups, rows):
        steps = builder.sdiv(groups, int64(16))
        where = (a, a_step, int64(LINE)), (b, b_step), (c, c_step)
        with builder.if_else(builder.icmp_signed(">", rows, int64(16))) as (many, few):
            with many:
                _multiply_tiles(name, builder, *where, steps, (0, 1))
            with few:
                _multiply_tiles(name, builder, *where, steps, (0,))

    return make


@emitted(types.void, ADDRESS, WORDS, ADDRESS, WORD, ADDRESS, WORD, WORD, types.boolean)
def add_block(builder, a, a_steps, b, b_step, c, c_step, steps, is_first):
    """c[32, 32] (+)= a[32, K] b[K, 32] of bf16 in tiles, K 32 times `steps`; c is float32.

    `a_steps` are bytes from row to row and from 32 inputs to the next, the others as of `block`.
    The sums begin at 0 where `is_first`, else at c.
    """
    where = (a, *a_steps), (b, b_step), (c, c_step)
    _multiply_tiles("llvm.x86.tdpbf16ps", builder, *where, steps, (0, 1), is_first)


def _multiply_tiles(name, builder, a, b, c, steps, halves, is_first=None):
    """Tiles 0 to 3 hold sums of 16 x 16; 4 and 5 are of a, 6 and 7 of b."""
    (a, a_step, a_next), (b, b_step), (c, c_step) = a, b, c
    module, number = builder.module, [ir.Constant(BYTE, n) for n in range(8)]
    zero = declared(module, "llvm.x86.tilezero", NOTHING, [BYTE])
    load = declared(module, "llvm.x86.tileloadd64", NOTHING, [BYTE, POINTER, WIDE])
    dot = declared(module, name, NOTHING, [BYTE, BYTE, BYTE])
    store = declared(module, "llvm.x86.tilestored64", NOTHING, [BYTE, POINTER, WIDE])

    def sums() -> Any:
        """(Tile, address) of each part of c."""
        for half in halves:
            rows = builder.gep(c, [builder.mul(c_step, int64(16 * half))])
            for column in (0, 1):
                yield number[2 * half + column], builder.gep(rows, [int64(64 * column)])

    def begin_at_zero() -> None:
        for tile, _ in sums():
            builder.call(zero, [tile])

    if is_first is None:
        begin_at_zero()
    else:
        with builder.if_else(is_first) as (first, later):
            with first:
                begin_at_zero()
            with later:
                for tile, place in sums():
                    builder.call(load, [tile, place, c_step])
    with cgutils.for_range(builder, steps) as loop:
        place = builder.gep(b, [builder.mul(builder.mul(loop.index, int64(16)), b_step)])
        for column in (0, 1):
            own = builder.gep(place, [int64(64 * column)])
            builder.call(load, [number[6 + column], own, b_step])
        for half in halves:
            offset = builder.mul(loop.index, a_next)
            offset = builder.add(offset, builder.mul(a_step, int64(16 * half)))
            builder.call(load, [number[4 + half], builder.gep(a, [offset]), a_step])
            for column in (0, 1):
                tiles = [number[2 * half + column], number[4 + half], number[6 + column]]
                builder.call(dot, tiles)
    for tile, place in sums():
        builder.call(store, [tile, place, c_step])


def store_transposed(builder: Any, vectors: list[Any], target: Any, step: Any) -> None:
    """Store 16 vectors of 16 words of 32 bits, rows for columns, `step` bytes apart."""
    for distance in (8, 4, 2, 1):
        own = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        other = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for k in range(LANES):
            if not k & distance:
                both = vectors[k], vectors[k + distance]
                vectors[k], vectors[k + distance] = (
                    builder.shuffle_vector(*both, ir.Constant(INTEGERS, lanes))
                    for lanes in (own, other)
                )
    for k, numbers in enumerate(vectors):
        place = builder.gep(target, [builder.mul(step, int64(k))])
        builder.store(numbers, builder.bitcast(place, INTEGERS.as_pointer()), align=1)


def load_row(builder: Any, start: Any, step: Any, number: Any, kind: Any) -> Any:
    """A vector of that kind, `number` times `step` bytes behind an address."""
    place = builder.gep(start, [builder.mul(step, number)])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


@emitted(types.void, ADDRESS, WORD, ADDRESS, WORD)
def transpose_words(builder, source, source_step, target, target_step):
    """A square of 16 x 16 words of 32 bits, rows for columns; steps are bytes from row to row."""
    rows = [load_row(builder, source, source_step, int64(k), INTEGERS) for k in range(LANES)]
    store_transposed(builder, rows, target, target_step)


@compiled
def zeros(rows, columns, like):
    """[rows, columns] of the dtype of `like`, at the start of a cache line.

    AMX loads and stores lines, and takes twice as long for two halves of them.
    """
    memory = np.zeros(rows * columns + LINE // like.itemsize, like.dtype)
    first = -memory.ctypes.data % LINE // like.itemsize
    return memory[first : first + rows * columns].reshape(rows, columns)
