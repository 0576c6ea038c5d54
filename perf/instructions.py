"""Bits of single PTX instructions, on a GPU or on the virtual one, as a record to compare.

    python perf/instructions.py --device cuda --out perf/results/DATE_h200_instructions.json
    python perf/instructions.py --device virtual:sm_90a --compare perf/results/DATE_h200_instructions.json

Of each case of ``instruction_cases.py``: SHA-256 of the inputs and of the results, of the first few thousand of them
too, and the first results in hexadecimal; of an approximate instruction also its largest error against double
precision. Of wgmma: the same for products of integers and of random numbers. ``--first N`` runs the first N inputs of
each case only; ``--names`` only cases whose name begins so. ``--raw DIR`` also keeps the first results themselves.

``--compare`` prints the cases whose bits are not those of the record and exits with 1 if there is one that has a right
result (an approximate instruction has none).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from instruction_cases import Array, Case, all_cases, hashes

THREADS = 256
PREFIXES = (256, 1024, 16384)  # hashed on their own
FIRST = 8  # results in a record
SHARED_BYTES = 32768
ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6  # of CUjit_option
KEPT = 8192  # results in a file of --raw
DECLARED = """
  .reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<256>; .reg .b64 %q<32>;
  .reg .b32 %tid0; .reg .b32 %cta0; .reg .b32 %at; .reg .b64 %wide; .reg .b64 %base;
  mov.u32 %tid0, %tid.x; mov.u32 %cta0, %ctaid.x; mad.lo.u32 %at, %cta0, 256, %tid0;
"""


def module(body: str, parameters: int, threads: int) -> str:
    listed = ", ".join(f".param .u64 p{number}" for number in range(parameters))
    return (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
        f".visible .entry instruction({listed})\n.reqntid {threads}, 1, 1\n{{{DECLARED}{body}\n  ret;\n}}\n"
    )


def per_thread(case: Case) -> str:
    """The module in which each thread runs the case's body on its own inputs."""
    lines = [f".reg .b{case.result} %o;"]
    for number, array in enumerate(case.inputs):
        size = array.dtype.itemsize
        lines.append(f".reg .b{8 * size} %i{number}; ld.param.u64 %base, [p{number}];")
        lines.append(f"mul.wide.u32 %wide, %at, {size}; add.s64 %wide, %base, %wide;")
        lines.append(f"ld.global.b{8 * size} %i{number}, [%wide];")
    lines.append(case.body)
    lines.append(f"ld.param.u64 %base, [p{case.arity}]; mul.wide.u32 %wide, %at, {case.result // 8};")
    lines.append(f"add.s64 %wide, %base, %wide; st.global.b{case.result} [%wide], %o;")
    return module("\n".join(lines), case.arity + 1, THREADS)


# ------------------------------------------------------------------------------------------------------------ machines


class Refused(Exception):
    """The machine does not take the kernel."""


Run = Callable[[str, list[Array], Array, int, int], Array]  # PTX, inputs, results, CTAs, threads -> results


def run_on_cuda(ptx: str, arrays: list[Array], result: Array, ctas: int, threads: int) -> Array:
    import torch

    on_device = [torch.from_numpy(array.view(np.uint8)).cuda() for array in (*arrays, result)]
    driver = ctypes.CDLL("libcuda.so.1")  # torch has made its context the current one

    def call(name: str, *values: Any) -> None:
        status = getattr(driver, name)(*values)
        if status:
            raise RuntimeError(f"{name}: CUDA driver error {status}")

    loaded, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(4096)
    options = (ctypes.c_int * 2)(ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    if driver.cuModuleLoadDataEx(ctypes.byref(loaded), ptx.encode(), 2, options, values):
        raise Refused(log.value.decode(errors="replace").strip())
    call("cuModuleGetFunction", ctypes.byref(function), loaded, b"instruction")
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in on_device]
    places = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call("cuLaunchKernel", function, ctas, 1, 1, threads, 1, 1, SHARED_BYTES, stream, places, None)
    torch.cuda.synchronize()
    call("cuModuleUnload", loaded)
    return on_device[-1].cpu().numpy().view(result.dtype)


def virtual(engine: Any = None) -> Run:
    from mok_cute.emulator.decode import parse_module
    from mok_cute.emulator.device import launch
    from mok_cute.emulator.execute import UnsupportedInstruction
    from mok_cute.emulator.memory import DeviceMemory

    def run(ptx: str, arrays: list[Array], result: Array, ctas: int, threads: int) -> Array:
        memory = DeviceMemory()
        result = result.copy()
        for number, array in enumerate((*arrays, result)):
            memory.add(array.ctypes.data, array.nbytes, f"array {number}")
        try:
            launch(
                parse_module(ptx)["instruction"],
                grid=(ctas, 1, 1),
                block=(threads, 1, 1),
                params=[array.ctypes.data.to_bytes(8, "little") for array in (*arrays, result)],
                memory=memory,
                dynamic_smem_bytes=SHARED_BYTES,
                engine=engine,
            )
        except UnsupportedInstruction as refused:
            raise Refused(str(refused)) from refused
        return result

    return run


# -------------------------------------------------------------------------------------------------------------- records


def digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).tobytes()).hexdigest()


def digests(array: Array) -> dict[str, str]:
    """Of the first few and of all."""
    found = {str(count): digest(array[:count]) for count in PREFIXES if count <= len(array)}
    return {**found, "all": digest(array)}


def run_case(run: Run, case: Case, first: int | None) -> tuple[tuple[Array, ...], Array]:
    """Inputs and results. The inputs are padded to whole CTAs and cut again."""
    inputs = tuple(array[:first] for array in case.inputs)
    count = len(inputs[0])
    ctas = -(-count // THREADS)
    padded = [np.concatenate([array, np.zeros(ctas * THREADS - count, array.dtype)]) for array in inputs]
    poison = np.full(ctas * THREADS, 0xA5, "u1").repeat(case.result // 8).view(f"u{case.result // 8}")
    return inputs, run(per_thread(case), padded, poison, ctas, THREADS)[:count]


@dataclass(frozen=True)
class Form:
    """A floating-point format: bits of its mantissa, its smallest normal exponent."""

    mantissa: int
    lowest: int
    largest: float


FORMS = {
    "f32": Form(23, -126, float(np.finfo(np.float32).max)),
    "f16": Form(10, -14, 65504.0),
    "bf16": Form(7, -126, 3.3895313892515355e38),
}


def values_of(bits: Array, form: str) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if form == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return bits.view({"f32": np.float32, "f16": np.float16}[form]).astype(np.float64)


def errors_of(case: Case, source: Array, result: Array) -> dict[str, Any]:
    """Largest error where source and exact result are normal numbers."""
    assert case.exact is not None
    form = FORMS[case.form]
    if case.name[:3] in ("sin", "cos"):
        source = source & np.uint32(0xC0FFFFFF)
    x, got = values_of(source, case.form), values_of(result, case.form)
    with np.errstate(all="ignore"):
        exact = case.exact(x)
        magnitude = np.abs(exact)
        judged = np.isfinite(x) & (np.abs(x) >= 2.0**form.lowest) & (magnitude <= form.largest)
        judged &= magnitude >= 2.0**form.lowest
        x, got, exact, magnitude = x[judged], got[judged], exact[judged], magnitude[judged]
        error = np.abs(got - exact)
        ulps = error / np.ldexp(1.0, np.floor(np.log2(magnitude)).astype(np.int64) - form.mantissa)
        relative = error / magnitude
    figures: dict[str, Any] = {"judged": len(x)}
    for name, figure in (("ulp", ulps), ("relative_error", relative), ("absolute_error", error)):
        at = int(np.argmax(figure))
        figures |= {f"max_{name}": float(figure[at]), f"max_{name}_at": float(x[at])}
    return figures


def record_of(case: Case, inputs: tuple[Array, ...], result: Array) -> dict[str, Any]:
    joined = hashlib.sha256(b"".join(digest(array).encode() for array in inputs)).hexdigest()
    record: dict[str, Any] = {
        "inputs": len(result),
        "inputs_sha256": joined,
        "sha256": digests(result),
        "first": [f"{value:#x}" for value in result[:FIRST].tolist()],
    }
    if case.exact is not None:
        record["approximate"] = errors_of(case, inputs[0], result)
    return record


# ---------------------------------------------------------------------------------------------------------------- wgmma

TILES, COLUMNS = 8, 64  # CTAs, each with a product of 64 rows; columns
K_BYTES = 32  # of an operand row that one instruction takes


@dataclass(frozen=True)
class Product:
    """D (64, COLUMNS) += A B^T in each CTA, in ``steps`` instructions.

    values   integers: small ones; normal: about the normal distribution; wide: exponents of a wide range
    """

    a: str
    b: str
    d: str
    values: str
    steps: int
    accumulates: bool = False

    @property
    def name(self) -> str:
        return f"wgmma {self.d}.{self.a}.{self.b} {self.values} x{self.steps}{' + D' if self.accumulates else ''}"

    @property
    def size(self) -> int:
        return {"bf16": 2, "f16": 2, "tf32": 4}.get(self.a, 1)

    def operand(self, kind: str, rows: int, seed: int) -> Array:
        """(TILES, rows, elements) as bits."""
        count = TILES * rows * self.steps * K_BYTES // self.size
        drawn = hashes(seed, count)
        shape = (TILES, rows, -1)
        if kind in ("s8", "u8"):
            return (drawn >> np.uint64(56)).astype("u1").reshape(shape)
        if self.values == "integers":
            value = (drawn >> np.uint64(61)).astype(np.int64) - 4
        elif self.values == "normal":
            parts = drawn[:, None] >> np.arange(0, 64, 16, dtype=np.uint64) & np.uint64(0xFFFF)
            value = (parts.sum(axis=1).astype(np.int64) - 131070) / 37837.0
        else:
            exponent = (drawn & np.uint64(0xFF)).astype(np.int64) % {"e4m3": 12, "e5m2": 24, "f16": 14}.get(kind, 24)
            mantissa = (drawn >> np.uint64(40)).astype(np.int64) - (1 << 23)
            value = np.ldexp(mantissa.astype(np.float64), exponent - 31)
        return encode(np.asarray(value, np.float64), kind).reshape(shape)

    def sums(self) -> Array:
        """(TILES, 128, registers) u4: D before the product."""
        registers = COLUMNS // (4 if self.d == "f16" else 2)
        count = TILES * 128 * registers
        drawn = hashes(77, count)
        if self.d == "s32":
            bits = (drawn >> np.uint64(40)).astype("u4")
        elif self.d == "f16":
            bits = (drawn >> np.uint64(32)).astype("u4") & np.uint32(0xBFFFBFFF)
        else:
            exponent = (drawn & np.uint64(0xFF)).astype(np.int64) % 24 - 31
            mantissa = (drawn >> np.uint64(40)).astype(np.int64) - (1 << 23)
            bits = np.ldexp(mantissa.astype(np.float64), exponent).astype(np.float32).view("u4")
        return bits.reshape(TILES, 128, registers)

    def data(self) -> Array:
        """Operands as they lie in shared memory without a swizzle: 8 rows of 16 bytes together, along K first."""
        parts = []
        for kind, rows, seed in ((self.a, 64, 71), (self.b, COLUMNS, 72)):
            raw = np.ascontiguousarray(self.operand(kind, rows, seed)).view("u1")
            parts.append(raw.reshape(TILES, rows // 8, 8, -1, 16).transpose(0, 1, 3, 2, 4).reshape(TILES, -1))
        return np.ascontiguousarray(np.concatenate(parts, axis=1)).view("u4")

    def kernel(self) -> str:
        registers = COLUMNS // (4 if self.d == "f16" else 2)
        row_bytes = self.steps * K_BYTES
        a_bytes, all_bytes = 64 * row_bytes, (64 + COLUMNS) * row_bytes
        names = [f"%r{number}" for number in range(registers)]
        body = f"""
        mov.u32 %r250, smem; mov.b32 %r251, %tid0; ld.param.u64 %q0, [p0]; mul.wide.u32 %q1, %cta0, {all_bytes};
        add.s64 %q0, %q0, %q1;
        FILL: shl.b32 %r252, %r251, 2; setp.ge.u32 %p1, %r252, {all_bytes}; @%p1 bra FILLED;
        cvt.u64.u32 %q2, %r252; add.s64 %q2, %q0, %q2; ld.global.b32 %r253, [%q2]; add.s32 %r254, %r250, %r252;
        st.shared.b32 [%r254], %r253; add.s32 %r251, %r251, 128; bra FILL;
        FILLED: fence.proxy.async.shared::cta; bar.sync 0;
        mad.lo.u32 %r253, %cta0, 128, %tid0; mul.wide.u32 %q3, %r253, {4 * registers};
        ld.param.u64 %q4, [p1]; add.s64 %q4, %q4, %q3; ld.param.u64 %q6, [p2]; add.s64 %q6, %q6, %q3;
        """
        body += "".join(f"ld.global.b32 {name}, [%q4+{4 * number}];" for number, name in enumerate(names))
        body += "wgmma.fence.sync.aligned;"
        high = 128 // 16 << 16 | 8 * row_bytes // 16 << 32
        k = K_BYTES // self.size
        more = "1, 1, 0, 0" if self.size == 2 else "" if self.a in ("s8", "u8") else "1, 1"
        for step in range(self.steps):
            for register, offset in (("%q8", 256 * step), ("%q9", a_bytes + 256 * step)):
                body += f"""add.s32 %r255, %r250, {offset}; shr.u32 %r255, %r255, 4; and.b32 %r255, %r255, 16383;
                cvt.u64.u32 {register}, %r255; or.b64 {register}, {register}, {high};"""
            body += f"setp.ne.s32 %p4, {int(self.accumulates or step > 0)}, 0;"
            body += f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k{k}.{self.d}.{self.a}.{self.b} "
            body += f"{{{', '.join(names)}}}, %q8, %q9, {', '.join(['%p4', more] if more else ['%p4'])};\n"
        body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
        body += "".join(f"st.global.b32 [%q6+{4 * number}], {name};" for number, name in enumerate(names))
        return module(body, 3, 128)

    def run(self, run: Run) -> Array:
        """(TILES, 128, registers) u4: the registers of every thread."""
        before = self.sums()
        return run(self.kernel(), [self.data(), before], np.full_like(before, 0xA5A5A5A5), TILES, 128)

    def exact(self) -> tuple[Array, Array]:
        """The sums in double precision and those of the magnitudes, both (TILES, 64, COLUMNS)."""
        a, b = (decode(self.operand(kind, rows, seed), kind) for kind, rows, seed in self.sources)
        before = self.matrix(self.sums()) if self.accumulates else np.zeros((TILES, 64, COLUMNS))
        return before + a @ b.transpose(0, 2, 1), np.abs(before) + np.abs(a) @ np.abs(b).transpose(0, 2, 1)

    @property
    def sources(self) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
        return (self.a, 64, 71), (self.b, COLUMNS, 72)

    def matrix(self, registers: Array) -> Array:
        """Registers of the threads -> (TILES, 64, COLUMNS) doubles."""
        kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[self.d]
        elements = np.ascontiguousarray(registers).view(kind).reshape(TILES, 4, 8, 4, COLUMNS // 8, 2, 2)
        # tile, warp, lane / 4, lane % 4, block of 8 columns, upper or lower 8 rows, column of a pair
        return elements.transpose(0, 1, 5, 2, 4, 3, 6).reshape(TILES, 64, COLUMNS).astype(np.float64)

    def record(self, result: Array) -> dict[str, Any]:
        exact, magnitude = self.exact()
        error = np.abs(self.matrix(result) - exact)
        return {
            "inputs": result.size,
            "inputs_sha256": digest(self.data()),
            "sha256": digests(result.reshape(-1)),
            "first": [f"{value:#x}" for value in result.reshape(-1)[:FIRST].tolist()],
            "largest_error": float(error.max()),
            "largest_error_by_magnitudes": float((error / np.maximum(magnitude, 1e-300)).max()),
        }


def encode(value: Array, kind: str) -> Array:
    """Doubles -> bits, rounded towards zero where the format has less."""
    if kind == "f16":
        return value.astype(np.float16).view("u2")
    single = value.astype(np.float32).view("u4")
    if kind == "bf16":
        return (single >> np.uint32(16)).astype("u2")
    if kind == "tf32":
        return single & np.uint32(0xFFFFE000)
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[kind]
    drop = np.uint32(23 - mantissa)
    exponent = (single >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64) - 127 + bias
    code = (exponent << mantissa) | (single >> drop & np.uint32((1 << mantissa) - 1))
    code = np.clip(np.where(exponent > 0, code, 0), 0, {"e4m3": 0x7E, "e5m2": 0x7B}[kind])
    return (code | (single >> np.uint32(31)).astype(np.int64) << 7).astype("u1")


def decode(bits: Array, kind: str) -> Array:
    if kind in ("s8", "u8"):
        return bits.view("i1" if kind == "s8" else "u1").astype(np.float64)
    if kind in ("bf16", "f16"):
        return values_of(bits, kind)
    if kind == "tf32":
        return values_of(bits, "f32")
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[kind]
    code = bits.astype(np.int64)
    exponent, fraction = (code & 0x7F) >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    value = np.where(exponent > 0, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))
    return np.where(code & 0x80, -value, value)


def all_products() -> list[Product]:
    found = []
    halves = [("bf16", "bf16", "f32"), ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("tf32", "tf32", "f32")]
    bytes_ = [(a, b, d) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f32", "f16")]
    for types in (*halves, *bytes_):
        found += [Product(*types, "integers", 2), Product(*types, "integers", 1, True)]
        if types[2] == "f32":
            found += [Product(*types, "normal", 1), Product(*types, "normal", 4), Product(*types, "wide", 1)]
            found += [Product(*types, "wide", 1, True), Product(*types, "wide", 4)]
    for a in ("s8", "u8"):
        found += [Product(a, b, "s32", "integers", 4, True) for b in ("s8", "u8")]
    return found


# -------------------------------------------------------------------------------------------------------------- program


def records(run: Run, names: tuple[str, ...], first: int | None) -> Iterator[tuple[str, dict[str, Any], Array | None]]:
    for case in all_cases():
        if case.name.startswith(names):
            try:
                inputs, result = run_case(run, case, first)
            except Refused as refused:
                yield case.name, {"refused": str(refused)}, None
            else:
                yield case.name, record_of(case, inputs, result), result
    for product in all_products():
        if product.name.startswith(names):
            try:
                result = product.run(run)
            except Refused as refused:
                yield product.name, {"refused": str(refused)}, None
            else:
                yield product.name, product.record(result), result.reshape(-1)


def has_one_right_result(name: str, record: dict[str, Any]) -> bool:
    return "approximate" not in record and not (name.startswith("wgmma") and "integers" not in name)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Cases of ours whose bits are not those of the other record, over the most inputs that both have hashed."""
    found = []
    for name, record in ours.items():
        other = theirs.get(name)
        if other is None:
            found.append(f"{name}: not in the other record")
        elif "refused" in record or "refused" in other:
            if ("refused" in record) != ("refused" in other):
                found.append(f"{name}: refused {'here' if 'refused' in record else 'there'}")
        else:
            whole = record["inputs_sha256"] == other["inputs_sha256"]
            common = [key for key in record["sha256"] if key in other["sha256"] and (key != "all" or whole)]
            if not common:
                found.append(f"{name}: nothing to compare")
            elif record["sha256"][common[-1]] != other["sha256"][common[-1]]:
                exact = has_one_right_result(name, record)
                found.append(f"{name}: other bits{'' if exact else ' (no single right result)'}")
    return found


class RawFiles:
    """The first results of each case, in files that stay small."""

    LIMIT = 12 << 20

    def __init__(self, folder: str) -> None:
        self.folder, self.size, self.count = Path(folder), 0, 0
        self.held: dict[str, Array] = {}

    def add(self, name: str, result: Array) -> None:
        kept = result[:KEPT] if not name.startswith("wgmma") else result
        if self.size + kept.nbytes > self.LIMIT:
            self.write()
        self.held[name.replace("/", "_")] = kept
        self.size += kept.nbytes

    def write(self) -> None:
        if self.held:
            np.savez_compressed(self.folder / f"raw_{self.count}.npz", allow_pickle=False, **self.held)
            self.held, self.size, self.count = {}, 0, self.count + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="virtual:sm_90a", choices=("cuda", "virtual:sm_90a"))
    parser.add_argument("--engine", choices=("fast", "reference"), help="of the virtual device")
    parser.add_argument("--first", type=int)
    parser.add_argument("--names", default="", help="several by |")
    parser.add_argument("--out")
    parser.add_argument("--raw")
    parser.add_argument("--compare")
    args = parser.parse_args()
    run = run_on_cuda if args.device == "cuda" else virtual(args.engine)
    raw = RawFiles(args.raw) if args.raw else None
    began = time.monotonic()
    found: dict[str, Any] = {}
    for name, record, result in records(run, tuple(args.names.split("|")), args.first):
        found[name] = record
        if raw is not None and result is not None:
            raw.add(name, result)
    if raw is not None:
        raw.write()
    gpu, cuda = "virtual GPU", None
    if args.device == "cuda":
        import torch

        gpu, cuda = torch.cuda.get_device_name(), torch.version.cuda
    seconds = round(time.monotonic() - began, 1)
    document = {
        "schema": 1,
        "environment": {
            "gpu": gpu,
            "cuda": cuda,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": f"python perf/instructions.py --device {args.device}",
            "seconds": seconds,
        },
        "cases": found,
    }
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    refused = [f"{name}: {record['refused']}" for name, record in found.items() if "refused" in record]
    print(f"{len(found)} cases, {len(refused)} refused, {seconds} s")
    if args.compare:
        other = json.loads(Path(args.compare).read_text())["cases"]
        unequal = differences(found, other)
        print("\n".join(unequal) or "the same bits")
        return int(any("no single right result" not in text for text in unequal))
    print("\n".join(refused))
    return 0


if __name__ == "__main__":
    sys.exit(main())
