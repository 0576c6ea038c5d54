"""Figures read from PTX, cubin and host code, on kernels small enough to know the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mok_cute import figures
from mok_cute.errors import CompileError
from mok_cute.figures import KernelFigures, count_instructions, kernel_figures, launch_smem_bytes, tmem_columns

SMEM_FLOATS = 1024


@cute.kernel
def exchange(address: Int64):
    thread, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator().allocate_array(Float32, SMEM_FLOATS)
    values = cute.make_tensor(smem, cute.make_layout(SMEM_FLOATS))
    values[thread] = Float32(thread)
    cute.arch.sync_threads()
    out = cute.make_ptr(Float32, address + Int64(thread) * 4, cutlass.AddressSpace.gmem)
    cute.arch.store(out, values[127 - thread])


@cute.jit
def launch_exchange(address: Int64):
    exchange(address).launch(grid=(1, 1, 1), block=(128, 1, 1))


@cute.jit
def launch_two(address: Int64, count: Int32):
    exchange(address).launch(grid=(1, 1, 1), block=(128, 1, 1))
    exchange(address + 512).launch(grid=(count, 1, 1), block=(128, 1, 1))


def compiled(function: Any, *args: Any, arch: str, folder: Path) -> Any:
    return cute.compile(function, *args, options=f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_figures_of_a_small_kernel(arch: str, tmp_path: Path) -> None:
    f = compiled(launch_exchange, Int64(8), arch=arch, folder=tmp_path)
    got = kernel_figures(f.__ptx__, f.__cubin__, str(f.ir_module))
    assert len(got.kernels) == 1 and "exchange" in got.kernels[0]
    assert 8 <= got.registers <= 64 and got.spill_bytes == 0
    assert got.smem_bytes == got.dynamic_smem_bytes == 4 * SMEM_FLOATS and got.static_smem_bytes == 0
    assert got.tmem_columns == 0
    assert got.instructions == {"bar.sync": 1}
    assert KernelFigures.from_json(json.loads(json.dumps(got.to_json()))) == got


def test_figures_cover_all_kernels_when_a_function_launches_several(tmp_path: Path) -> None:
    f = compiled(launch_two, Int64(8), Int32(1), arch="sm_90a", folder=tmp_path)
    got = kernel_figures(f.__ptx__, f.__cubin__, str(f.ir_module))
    assert len(got.kernels) == 2 and got.instructions == {"bar.sync": 2}
    assert launch_smem_bytes(str(f.ir_module)) == [4 * SMEM_FLOATS] * 2


def test_figures_leave_dynamic_memory_open_when_there_is_no_host_code(tmp_path: Path) -> None:
    f = compiled(launch_exchange, Int64(8), arch="sm_90a", folder=tmp_path)
    got = kernel_figures(f.__ptx__, f.__cubin__, None)
    assert (got.dynamic_smem_bytes, got.smem_bytes) == (None, 0)


def test_instructions_are_counted_behind_predicates_labels_and_braces_and_not_in_comments() -> None:
    ptx = """
    // wgmma.fence.sync.aligned;
    /* bar.sync 0;
       bar.sync 1; */
    $L__BB0_1: bar.sync 0;
    @%p1 bar.sync 1;
    @!%p2 red.release.gpu.global.add.s32 [%rd1], 1;
    { .reg .pred p; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, p, 1, 1, 0, 1; }
    setp.ne.b32 p, %r1, 0; mbarrier.try_wait.parity.shared.b64 p, [%r1], %r2;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];
    tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r3, p;
    fence.proxy.async.shared::cta;
    mov.b32 %r1, bar;
    add.s32 %r1, %r2, %r3;
    ld.global.mbarrier [%r1];
    """
    assert count_instructions(ptx) == {
        "bar.sync": 2,
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": 1,
        "fence.proxy.async.shared::cta": 1,
        "mbarrier.try_wait.parity.shared.b64": 1,
        "red.release.gpu.global.add.s32": 1,
        "tcgen05.mma.cta_group::2.kind::f16": 1,
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16": 1,
    }


def test_tensor_memory_columns_are_read_from_constants_and_registers() -> None:
    alloc = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r4], {};"
    assert tmem_columns("mov.b32 %r1, 5;") == 0
    assert tmem_columns(alloc.format(256)) == 256
    assert tmem_columns("mov.b32 %r5, 512;\n" + alloc.format("%r5") + "\n" + alloc.format(128)) == 512
    with pytest.raises(CompileError, match="%r5, which is not a constant"):
        tmem_columns(alloc.format("%r5"))


@pytest.mark.parametrize("cubin", [b"", b"not an ELF file", b"\x7fELF" + bytes(100)])
def test_figures_refuse_a_cubin_that_cannot_be_read(cubin: bytes) -> None:
    with pytest.raises(CompileError, match="cannot be read|holds no kernel"):
        figures.kernel_figures("", cubin, None)


def test_tensor_memory_is_seen_in_a_compiled_kernel(tmp_path: Path) -> None:
    f = compiled(launch_columns, Int64(8), arch="sm_100a", folder=tmp_path)
    assert kernel_figures(f.__ptx__, f.__cubin__, str(f.ir_module)).tmem_columns == 128


@cute.kernel
def columns(address: Int64):
    slot = SmemAllocator().allocate_array(Int32, 1)
    cute.arch.alloc_tmem(128, slot)
    cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, slot), 128)


@cute.jit
def launch_columns(address: Int64):
    columns(address).launch(grid=(1, 1, 1), block=(32, 1, 1))
