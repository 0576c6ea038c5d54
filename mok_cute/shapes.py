"""MoEShape: what the model asks for, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mok_cute.errors import ConfigError, UnsupportedError

SIZE_MULTIPLE = 128  # a GEMM tile's columns and two 64-element contraction steps


@dataclass(frozen=True)
class MoEShape:
    """One mixture-of-experts layer: y[t] = s[t] * S(x[t]) + sum over k of w[t, k] * E[id[t, k]](x[t]).

    hidden                width of x and y
    intermediate          width inside a routed expert
    num_experts           routed experts of the model, over all ranks
    topk                  routes per token
    shared_intermediate   width inside the shared expert; 0: none
    shared_factor         the shared expert carries a per-token FP32 factor s
    swiglu_limit          clamp before the activation (gate from above, up on both sides); None: no clamp
    """

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    shared_intermediate: int = 0
    shared_factor: bool = False
    swiglu_limit: float | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        for argument in ("hidden", "intermediate", "num_experts", "topk", "shared_intermediate"):
            value = getattr(self, argument)
            least = 0 if argument == "shared_intermediate" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"MoEShape: {argument}={value!r}: an integer of at least {least}; pass another.")
        for argument in ("hidden", "intermediate", "shared_intermediate"):
            value = getattr(self, argument)
            if value % SIZE_MULTIPLE:
                up = -(-value // SIZE_MULTIPLE) * SIZE_MULTIPLE
                raise UnsupportedError(
                    f"MoEShape: {argument}={value}: must be a multiple of {SIZE_MULTIPLE}, the width of a tile; "
                    f"pad the weights with zeros to {up}."
                )
        if self.topk > 255:
            raise UnsupportedError(f"MoEShape: topk={self.topk}: at most 255 routes per token; lower topk.")
        if self.shared_factor and not self.shared_intermediate:
            raise ConfigError(
                "MoEShape: shared_factor=True without a shared expert: set shared_intermediate or drop the factor."
            )
        if self.swiglu_limit is not None and not self.swiglu_limit >= 0:
            raise ConfigError(
                f"MoEShape: swiglu_limit={self.swiglu_limit!r}: None or a number of at least 0; pass another."
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> MoEShape:
        """A published model's layer by name, with single sizes replaced by ``overrides`` (None: not replaced).

        Taking the shared expert away (shared_intermediate=0) takes its per-token factor away too.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset={name!r}: unknown; choose one of {', '.join(PRESETS)}.")
        given = {key: value for key, value in overrides.items() if value is not None}
        if given.get("shared_intermediate") == 0:
            given.setdefault("shared_factor", False)
        return replace(PRESETS[name], **given)

    def local_experts(self, ep_size: int) -> int:
        """Experts per rank, ceil(E / P): what kernels are compiled for. The last ranks may own fewer."""
        if ep_size < 1:
            raise ConfigError(f"ep_size={ep_size}: at least 1; pass the number of ranks.")
        return -(-self.num_experts // ep_size)

    def owner(self, expert: int, ep_size: int) -> int:
        """The rank that a global expert lives on."""
        return expert // self.local_experts(ep_size)

    def owned_experts(self, rank: int, ep_size: int) -> range:
        """Global experts of a rank; empty for the last ranks when the experts run out."""
        each = self.local_experts(ep_size)
        return range(min(rank * each, self.num_experts), min((rank + 1) * each, self.num_experts))

    def flops_forward(self, routes: int, tokens: int = 0) -> int:
        """Multiply-adds times two of ``routes`` routed rows and ``tokens`` rows of the shared expert."""
        return 6 * self.hidden * (routes * self.intermediate + tokens * self.shared_intermediate)


PRESETS = {
    shape.name: shape
    for shape in (
        MoEShape(7168, 2048, 256, 8, 2048, name="deepseek-v3"),
        MoEShape(7168, 2048, 384, 8, 2048, name="kimi-k2"),
        MoEShape(6144, 2048, 256, 8, 2048, name="glm-5"),
        MoEShape(4096, 1024, 512, 10, 1024, shared_factor=True, name="qwen3.5"),
        MoEShape(7168, 3072, 384, 6, 3072, name="deepseek-v4-pro"),
        MoEShape(2048, 768, 128, 8, 0, name="qwen3-30b"),
        MoEShape(256, 256, 8, 2, 256, name="tiny"),
    )
}
