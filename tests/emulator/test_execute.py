"""Arithmetic, conversions and control flow of the virtual GPU against Python integers, exact fractions and torch."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from microkernel import make_kernel, per_thread, run_kernel

from mok_cute.emulator.decode import parse_module
from mok_cute.emulator.device import Deadlock
from mok_cute.emulator.execute import KernelFault, UnsupportedInstruction
from mok_cute.emulator.memory import DeviceMemory, MemoryFault

pytestmark = pytest.mark.emulated

EDGES = [0, 1, 2, 3, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x12345678]


def words(seed, count=64):
    """Random 32-bit words, the edges among them."""
    values = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)
    values[: len(EDGES)] = EDGES
    return values.astype(np.uint32)


def shuffled(seed):
    return np.random.default_rng(seed).permutation(words(seed))


def signed(value):
    return value - 2**32 if value >> 31 else value


def truncated(a, b):
    """Quotient towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Callable[[int, int], int | None]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": max,
    "div.u32": lambda a, b: a // b if b else 0xFFFFFFFF,
    "div.s32": lambda a, b: truncated(signed(a), signed(b)) if b else 0xFFFFFFFF,
    "rem.s32": lambda a, b: signed(a) - truncated(signed(a), signed(b)) * signed(b) if b else None,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
}


@pytest.mark.parametrize("name", BINARY)
def test_integer_instruction_agrees_with_python(name):
    a, b = words(1), shuffled(2)
    if name.startswith("sh"):
        b %= 40
    got = per_thread(f"{name} %o, %i0, %i1;", a, b, result="u4")
    for x, y, value in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        expected = BINARY[name](x, y)
        if expected is not None:
            assert value == expected & 0xFFFFFFFF, f"{name} {x:#x}, {y:#x}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mul.wide.s32 %o, %i0, %i1;", lambda a, b: signed(a) * signed(b)),
        ("mul.wide.u32 %o, %i0, %i1;", lambda a, b: a * b),
        ("mad.wide.u32 %o, %i0, %i1, 7;", lambda a, b: a * b + 7),
        ("mov.b64 %o, {%i0, %i1};", lambda a, b: a | b << 32),
        ("cvt.s64.s32 %o, %i0;", lambda a, b: signed(a)),
        ("cvt.u64.u32 %o, %i1;", lambda a, b: b),
    ],
)
def test_wide_result_agrees_with_python(body, expected):
    a, b = words(3), shuffled(4)
    got = per_thread(body, a, b, result="u8")
    assert got.tolist() == [expected(x, y) & (2**64 - 1) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("popc.b32 %o, %i0;", lambda a, b: bin(a).count("1")),
        ("clz.b32 %o, %i0;", lambda a, b: 32 - a.bit_length()),
        ("brev.b32 %o, %i0;", lambda a, b: int(f"{a:032b}"[::-1], 2)),
        ("not.b32 %o, %i0;", lambda a, b: ~a),
        ("abs.s32 %o, %i0;", lambda a, b: abs(signed(a))),
        ("lop3.b32 %o, %i0, %i1, 85, 0x96;", lambda a, b: a ^ b ^ 85),
        ("lop3.b32 %o, %i0, %i1, 85, 0xca;", lambda a, b: (a & b) | (~a & 85)),
        ("prmt.b32 %o, %i0, %i1, 0x7210;", lambda a, b: a & 0xFFFFFF | b >> 24 << 24),
        ("prmt.b32 %o, %i0, %i1, 0x888B;", lambda a, b: _signs(a, (3, 0, 0, 0))),
        ("shf.l.wrap.b32 %o, %i0, %i1, 5;", lambda a, b: (b << 5) | (a >> 27)),
        ("shf.r.clamp.b32 %o, %i0, %i1, 40;", lambda a, b: b),
        ("bfe.u32 %o, %i0, 4, 8;", lambda a, b: a >> 4 & 0xFF),
        ("mad.lo.s32 %o, %i0, %i1, -3;", lambda a, b: a * b - 3),
        ("setp.lt.s32 %p1, %i0, %i1; selp.b32 %o, 1, 0, %p1;", lambda a, b: signed(a) < signed(b)),
        ("setp.lt.u32 %p1, %i0, %i1; selp.b32 %o, 1, 0, %p1;", lambda a, b: a < b),
        ("mov.b32 {%h1, %h2}, %i0; mov.b32 %o, {%h2, %h1};", lambda a, b: a >> 16 | a << 16),
        ("mov.b32 %o, 9; setp.eq.s32 %p1, %t, 3; @!%p1 add.s32 %o, %i0, 0;", None),
    ],
)
def test_word_instruction_agrees_with_python(body, expected):
    a, b = words(5), shuffled(6)
    got = per_thread(body, a, b, result="u4").tolist()
    if expected is None:
        want = a.tolist()
        want[3] = 9
    else:
        want = [int(expected(x, y)) & 0xFFFFFFFF for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert got == want


def _signs(word, selected):
    return sum((0xFF if word >> (8 * byte + 7) & 1 else 0) << (8 * at) for at, byte in enumerate(selected))


# -------------------------------------------------------------------------------------------------------------- floats


def singles(seed, count=256):
    """Numbers of all sizes, with special ones among them."""
    generator = np.random.default_rng(seed)
    values = np.ldexp(generator.standard_normal(count), generator.integers(-140, 120, count)).astype(np.float32)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    return generator.permutation(values)


def nearest_single(exact):
    """A fraction rounded once to single precision, ties to even."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(
        (value for value in near if np.isfinite(value)),
        key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1),
    )


def test_fma_rounds_once():
    a, b, c = singles(1), singles(2), singles(3)
    # A tie in single precision that rounding to double first would miss.
    a[0], b[0], c[0] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2**-60)
    got = per_thread("fma.rn.f32 %o, %i0, %i1, %i2;", a, b, c, result="f4")
    for x, y, z, value in zip(a, b, c, got, strict=True):
        with np.errstate(all="ignore"):
            rough = float(x) * float(y) + float(z)
        if np.isfinite(rough) and abs(rough) < 3e38:
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            assert value == nearest_single(exact), f"{x} * {y} + {z}"
        else:
            assert np.isnan(value) == np.isnan(rough)


@pytest.mark.parametrize(
    ("name", "function"), [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)]
)
def test_float_instruction_agrees_with_ieee(name, function):
    a, b = singles(4), singles(5)
    with np.errstate(all="ignore"):
        expected = function(a, b)
    np.testing.assert_array_equal(per_thread(f"{name}.f32 %o, %i0, %i1;", a, b, result="f4"), expected)


def test_max_ignores_nan_unless_told():
    a, b = np.array([np.nan, 1, np.nan], "f4"), np.array([2, np.nan, np.nan], "f4")
    np.testing.assert_array_equal(
        per_thread("max.f32 %o, %i0, %i1;", a, b, result="f4"), np.array([2, 1, np.nan], "f4")
    )
    assert np.isnan(per_thread("max.NaN.f32 %o, %i0, %i1;", a, b, result="f4")).all()


def test_packed_float_arithmetic_works_on_both_halves():
    a, b = singles(6).reshape(-1, 2), singles(7).reshape(-1, 2)
    packed = per_thread(
        "mul.f32x2 %o, %i0, %i1;", a.copy().view("u8").ravel(), b.copy().view("u8").ravel(), result="u8"
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(packed.view("f4").reshape(-1, 2), a * b)


@pytest.mark.parametrize(
    ("name", "function"),
    [("ex2.approx.ftz", np.exp2), ("rcp.approx.ftz", np.reciprocal), ("rsqrt.approx", lambda a: 1 / np.sqrt(a))],
)
def test_approximate_instruction_is_close(name, function):
    a = np.random.default_rng(8).uniform(0.01, 60, 128).astype("f4")
    got = per_thread(f"{name}.f32 %o, %i0;", a, result="f4")
    np.testing.assert_allclose(got, function(a.astype("f8")), rtol=2**-23)


def test_unordered_comparison_is_true_for_nan():
    a, b = np.array([np.nan, 1, 2, np.inf], "f4"), np.array([1, np.nan, 3, np.inf], "f4")
    for name, expected in (("ltu", [1, 1, 1, 0]), ("lt", [0, 0, 1, 0]), ("neu", [1, 1, 1, 0]), ("ne", [0, 0, 1, 0])):
        got = per_thread(f"setp.{name}.f32 %p1, %i0, %i1; selp.b32 %o, 1, 0, %p1;", a, b, result="u4")
        assert got.tolist() == expected, name


# --------------------------------------------------------------------------------------------------------- conversions


def test_f32_to_bf16_agrees_with_torch():
    a = np.concatenate([singles(9, 512), (0x3F800000 + np.arange(512) * 0x2000).astype("u4").view("f4")])
    got = per_thread("cvt.rn.bf16.f32 %o, %i0;", a, result="u2")
    expected = torch.from_numpy(a).to(torch.bfloat16)
    same = torch.from_numpy(got.view("i2")).view(torch.bfloat16)
    assert torch.equal(same.isnan(), expected.isnan())
    assert torch.equal(same.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_every_half_widens_exactly(kind, dtype):
    for first in range(0, 1 << 16, 1024):
        halves = np.arange(first, first + 1024).astype("u2")
        got = torch.from_numpy(per_thread(f"cvt.f32.{kind} %o, %i0;", halves, result="f4"))
        expected = torch.from_numpy(halves.view("i2")).view(dtype).float()
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_packed_conversion_puts_the_first_source_in_the_upper_half():
    a, b = np.array([1.0, -2.0], "f4"), np.array([3.0, 0.5], "f4")
    assert per_thread("cvt.rn.f16x2.f32 %o, %i0, %i1;", a, b, result="u4").tolist() == [0x3C004200, 0xC0003800]
    assert per_thread("cvt.rn.bf16x2.f32 %o, %i0, %i1;", a, b, result="u4").tolist() == [0x3F804040, 0xC0003F00]


def test_float_to_integer_clamps_and_takes_nan_as_zero():
    a = np.array([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf], "f4")
    assert per_thread("cvt.rni.s32.f32 %o, %i0;", a, result="i4").tolist() == [
        2,
        2,
        -2,
        2**31 - 1,
        -(2**31),
        0,
        2**31 - 1,
    ]
    assert per_thread("cvt.rzi.u32.f32 %o, %i0;", a, result="u4").tolist() == [1, 2, 0, 3 * 10**9, 0, 0, 2**32 - 1]


# -------------------------------------------------------------------------------------------- control flow and warps


def test_lanes_come_together_after_a_loop_of_unequal_length():
    body = """
    mov.b32 %o, 0; mov.b32 %r1, 0;
    LOOP: setp.ge.u32 %p1, %r1, %i0; @%p1 bra DONE;
    add.s32 %o, %o, %r1; add.s32 %r1, %r1, 1; bra LOOP;
    DONE: vote.sync.ballot.b32 %r2, 1, -1; setp.ne.b32 %p2, %r2, -1; @%p2 mov.b32 %o, -1;
    """
    counts = np.random.default_rng(1).integers(0, 20, 64).astype("u4")
    assert per_thread(body, counts, result="u4").tolist() == [n * (n - 1) // 2 if n else 0 for n in counts.tolist()]


def test_same_label_and_register_in_two_inline_blocks_are_different():
    block = "{ .reg .pred P1; setp.lt.u32 P1, %t, %s; AGAIN: @P1 bra SKIP; add.s32 %o, %o, 1; SKIP: }"
    body = "mov.b32 %o, %i0; " + block.replace("%s", "8") + block.replace("%s", "16")
    got = per_thread(body, np.zeros(32, "u4"), result="u4")
    assert got.tolist() == [0] * 8 + [1] * 8 + [2] * 16


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.idx.b32 %o, %i0, 5, 31, -1;", lambda lane: 105),
        ("shfl.sync.up.b32 %o, %i0, 3, 0, -1;", lambda lane: 100 + (lane - 3 if lane >= 3 else lane)),
        ("shfl.sync.down.b32 %o|%p1, %i0, 4, 31, -1; @!%p1 mov.b32 %o, 0;", lambda n: 104 + n if n < 28 else 0),
        ("shfl.sync.bfly.b32 %o, %i0, 1, 31, -1;", lambda lane: 100 + (lane ^ 1)),
        ("shfl.sync.idx.b32 %o, %i0, 1, 0x181f, -1;", lambda lane: 100 + (lane & ~7) + 1),
        ("setp.gt.u32 %p1, %i0, 120; vote.sync.ballot.b32 %o, %p1, -1;", lambda lane: 0xFFE00000),
        ("elect.sync %o|%p1, -1; @%p1 mov.b32 %o, 77;", lambda lane: 77 if lane == 0 else 0),
        ("and.b32 %r1, %t, 3; match.any.sync.b32 %o, %r1, -1;", lambda lane: 0x11111111 << (lane & 3)),
    ],
)
def test_exchange_between_lanes(body, expected):
    got = per_thread(body, np.arange(100, 132, dtype="u4"), result="u4")
    assert got.tolist() == [expected(lane) for lane in range(32)]


@pytest.mark.parametrize(("name", "fold"), [("add", sum), ("max", max), ("min", min)])
def test_atomics_of_all_threads_reach_one_word(name, fold):
    word, values = np.array([50], "u4"), np.random.default_rng(3).integers(1, 100, 128).astype("u4")
    body = f"""ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; mul.wide.u32 %q2, %t, 4; add.s64 %q1, %q1, %q2;
    ld.global.b32 %r1, [%q1]; red.release.gpu.global.{name}.u32 [%q0], %r1;"""
    run_kernel(body, word, values, threads=128, seed=4)
    assert word[0] == fold([50, *values.tolist()])


def test_compare_and_swap_lets_one_thread_win():
    word, won = np.zeros(1, "u4"), np.zeros(1, "u4")
    body = """ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; add.s32 %r1, %t, 7;
    atom.global.acq_rel.cas.b32 %r2, [%q0], 0, %r1; setp.eq.b32 %p1, %r2, 0; @%p1 red.global.add.u32 [%q1], 1;"""
    run_kernel(body, word, won, threads=96)
    assert won[0] == 1 and 7 <= word[0] < 7 + 96


def test_vector_load_and_store_through_shared_memory():
    a = np.arange(128, dtype="u4")
    b = np.zeros(128, "u4")
    body = """ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; mul.wide.u32 %q2, %t, 16;
    add.s64 %q0, %q0, %q2; add.s64 %q1, %q1, %q2; mov.b32 %r9, smem; shl.b32 %r8, %t, 4; add.s32 %r9, %r9, %r8;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%q0]; st.shared.v4.b32 [%r9], {%r4, %r3, %r2, %r1};
    ld.shared.v2.b64 {%q3, %q4}, [%r9]; st.global.v2.b64 [%q1], {%q3, %q4};"""
    run_kernel(body, a, b)
    np.testing.assert_array_equal(b.reshape(-1, 4), a.reshape(-1, 4)[:, ::-1])


# ------------------------------------------------------------------------------------------------------------ refusals


def test_unknown_instruction_is_named_with_its_line():
    with pytest.raises(UnsupportedInstruction, match=r"frobnicate\.b32 %r1, %r2.*PTX line 10"):
        run_kernel("  frobnicate.b32 %r1, %r2;", np.zeros(1, "u4"))


def test_unknown_form_of_a_known_instruction_is_refused():
    with pytest.raises(UnsupportedInstruction, match="form not known"):
        run_kernel("cvt.rm.satfinite.ue8m0x2.f32 %h1, %r1, %r2;", np.zeros(1, "u4"))


def test_stray_address_names_kernel_warp_and_instruction():
    with pytest.raises(MemoryFault, match=r"micro, CTA \(0, 0, 0\), warp 0.*ld\.global\.b32 %r1, \[%q0\+64\]"):
        run_kernel("ld.param.b64 %q0, [p0]; ld.global.b32 %r1, [%q0+64];", np.zeros(4, "u4"), memory=DeviceMemory())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("mov.b32 %r1, 0; ld.shared.b32 %r2, [%r1];", "offset 0x0"),
        ("mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1+16384];", "offset 0x4400"),
        ("mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1+2];", "not a multiple of 4"),
        ("trap;", "trap"),
    ],
)
def test_bad_access_is_a_fault(body, words):
    with pytest.raises(KernelFault, match=words):
        run_kernel(body, np.zeros(1, "u4"))


def test_endless_loop_ends_at_the_limit():
    with pytest.raises(Deadlock, match="no end after"):
        run_kernel("AGAIN: add.s32 %r1, %r1, 1; bra AGAIN;", np.zeros(1, "u4"), max_steps=5000)


def test_source_lines_and_comments_are_read():
    kernel = make_kernel("/* a\nb */ add.s32 %r1, %r2, 1; // c\n", 0, 32)
    assert [i.opcode for i in kernel.instructions] == ["mov.u32", "add.s32", "ret"]
    text = '.file 1 "a.py"\n.visible .entry k()\n{\n.loc 1 42 3\nret;\n}\n'
    assert parse_module(text)["k"].instructions[0].source == "a.py:42"
