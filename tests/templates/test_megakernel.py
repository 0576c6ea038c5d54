"""The forward megakernel as the compiler makes it for sm_90a: no spills, the right instructions, one kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mok_cute.arch import ARCHS
from mok_cute.compile import CompiledKernel, compile_forward
from mok_cute.config import KernelConfig
from mok_cute.settings import Settings
from mok_cute.shapes import PRESETS, MoEShape
from mok_cute.templates.warps import SM90_REGISTERS_CONSUMER, SM90_REGISTERS_SERVICE, SM90_WARPS

SM90 = ARCHS["sm_90a"]
REGISTERS_AT_ENTRY = 168  # 64 Ki registers over 384 threads, a multiple of 8
SHAPES = {
    "tiny": MoEShape.preset("tiny"),
    "qwen3-30b": MoEShape.preset("qwen3-30b"),
    "deepseek-v3": MoEShape.preset("deepseek-v3", num_experts=32),
    "clamp and shared factor": MoEShape(384, 128, 6, 11, 256, shared_factor=True, swiglu_limit=7.0),
}


def compiled_for(shape: MoEShape, cache: Path, local_experts: int | None = None) -> CompiledKernel:
    return compile_forward(shape, None, SM90.name, local_experts or shape.num_experts, Settings(cache_dir=cache))


def assert_well_compiled(kernel: CompiledKernel) -> None:
    figures, ptx = kernel.figures, kernel.ptx
    assert len(re.findall(r"^\s*(?:\.visible\s+)?\.entry\b", ptx, re.MULTILINE)) == len(figures.kernels) == 1
    assert ".target sm_90a" in ptx
    assert figures.spill_bytes == 0
    assert not re.findall(r"\b(?:ld|st)\.local\b", ptx), "an array or a spilled register lies in local memory"
    assert figures.registers == REGISTERS_AT_ENTRY
    counts = figures.instructions
    assert counts["wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"] == KernelConfig().tile_k // 16
    assert not [opcode for opcode in counts if opcode.startswith("wgmma.mma_async") and "m64n256k16" not in opcode]
    assert re.findall(r"setmaxnreg\.(dec|inc)\.sync\.aligned\.u32\s+(\d+);", ptx) == [
        ("dec", str(SM90_REGISTERS_SERVICE)),
        ("inc", str(SM90_REGISTERS_CONSUMER)),
    ]
    plan = sum(kernel.config.smem_plan(kernel.shape, kernel.local_experts).values())
    assert plan <= figures.smem_bytes < plan + 128, "the plan that validation and explain use"
    assert figures.smem_bytes <= SM90.smem_bytes_per_cta
    assert figures.tmem_columns == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_forward_compiles_without_spills_and_into_one_kernel(shape: MoEShape, tmp_path: Path) -> None:
    kernel = compiled_for(shape, tmp_path)
    assert_well_compiled(kernel)
    assert not kernel.cached
    assert compiled_for(shape, tmp_path).cached


def test_registers_of_the_roles_fill_the_register_file() -> None:
    service, consumer = SM90_REGISTERS_SERVICE, SM90_REGISTERS_CONSUMER
    assert 128 * (service + 2 * consumer) <= SM90.registers_per_sm
    assert 32 * SM90_WARPS == KernelConfig().threads
    assert REGISTERS_AT_ENTRY == SM90.registers_per_sm // (32 * SM90_WARPS) // 8 * 8


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_every_preset_compiles_without_spills(ranks: int, tmp_path: Path) -> None:
    for shape in PRESETS.values():
        assert_well_compiled(compiled_for(shape, tmp_path, shape.local_experts(ranks)))
