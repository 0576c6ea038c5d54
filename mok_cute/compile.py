"""(shape, config, arch) -> CompiledKernel: traces the templates, or loads what was built before.

Nothing here needs a GPU. Token counts, routing, ranks and every pointer are run-time arguments: a new token count
never compiles again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok_cute import arch as machines
from mok_cute import cache
from mok_cute.config import ROW_BLOCK, KernelConfig
from mok_cute.settings import Settings

if TYPE_CHECKING:
    from mok_cute.figures import KernelFigures
    from mok_cute.shapes import MoEShape

OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin"


@dataclass(frozen=True)
class CompiledKernel:
    """A built kernel. ``function`` takes the launch arguments in order and a raw stream handle."""

    function: Callable[..., object]
    figures: KernelFigures
    ptx: str
    cubin: bytes
    compile_seconds: float
    cached: bool
    shape: MoEShape
    config: KernelConfig
    arch: str
    local_experts: int


@dataclass(frozen=True)
class CompiledSchedule:
    """The three schedule kernels by launch name: publish, count, place."""

    functions: dict[str, Callable[..., object]]
    figures: dict[str, KernelFigures]


def _options(arch_name: str, dumps: Path) -> str:
    return f"{OPTIONS} --gpu-arch {arch_name} --dump-dir {dumps}"


def compile_forward(
    shape: MoEShape,
    config: KernelConfig | None,
    arch_name: str,
    local_experts: int,
    settings: Settings | None = None,
) -> CompiledKernel:
    """Build the forward megakernel for ``local_experts`` experts per rank, or load it from the cache.

    Raises UnsupportedError for what cannot be built on ``arch_name``, CompileError when the compiler fails.
    """
    config = config or KernelConfig.default(arch_name)
    machine = machines.get(arch_name)
    config.validate(shape, machine.name, machine.smem_bytes_per_cta, local_experts)

    from mok_cute.templates import registry
    from mok_cute.templates.interface import Plan

    plan = Plan(shape, config, machine, local_experts)

    def build(dumps: Path) -> Any:
        import cutlass.cute as cute
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from mok_cute.templates.launch_args import FORWARD_ARGS
        from mok_cute.templates.megakernel import ForwardMegakernel

        kernel = ForwardMegakernel(plan)
        example = {"Int32": Int32(1), "Int64": Int64(16)}
        arguments = [example[kind] for _, kind in FORWARD_ARGS]
        return cute.compile(kernel, *arguments, make_fake_stream(), options=_options(arch_name, dumps))

    fields = asdict(shape)
    del fields["name"], fields["num_experts"]  # neither changes the code
    inputs = {"kernel": "forward", "shape": fields, "config": asdict(config), "local_experts": local_experts}
    inputs["options"] = OPTIONS
    inputs["foreign_roles"] = registry.foreign_sources(plan)
    loaded = cache.get_or_build(inputs, arch_name, {"forward": build}, settings or Settings.from_environment())
    return CompiledKernel(
        function=loaded.functions["forward"],
        figures=loaded.figures["forward"],
        ptx=loaded.ptx["forward"],
        cubin=loaded.cubin["forward"],
        compile_seconds=loaded.compile_seconds,
        cached=loaded.cached,
        shape=shape,
        config=config,
        arch=arch_name,
        local_experts=local_experts,
    )


def compile_schedule(
    shape: MoEShape,
    arch_name: str,
    ep_size: int,
    id_bits: int,
    settings: Settings | None = None,
    row_block: int = ROW_BLOCK,
) -> CompiledSchedule:
    """Build the schedule kernels for int32 or int64 expert ids, or load them from the cache.

    row_block   rows of a GEMM tile, which experts' segments are padded to
    """
    local_experts = shape.local_experts(ep_size)
    machines.get(arch_name)

    def builder(launch: str) -> cache.Build:
        def build(dumps: Path) -> Any:
            import cutlass.cute as cute

            from mok_cute.templates.schedule.kernels import ScheduleKernels

            kernels = ScheduleKernels(
                num_experts=shape.num_experts,
                local_experts=local_experts,
                topk=shape.topk,
                id_bits=id_bits,
                row_block=row_block,
            )
            return cute.compile(
                getattr(kernels, launch), *kernels.example_arguments(), options=_options(arch_name, dumps)
            )

        return build

    from mok_cute.schedule import LAUNCHES

    inputs = {
        "kernel": "schedule",
        "num_experts": shape.num_experts,
        "local_experts": local_experts,
        "topk": shape.topk,
        "id_bits": id_bits,
        "row_block": row_block,
        "options": OPTIONS,
    }
    builders = {launch: builder(launch) for launch in LAUNCHES}
    loaded = cache.get_or_build(inputs, arch_name, builders, settings or Settings.from_environment())
    return CompiledSchedule(loaded.functions, loaded.figures)
