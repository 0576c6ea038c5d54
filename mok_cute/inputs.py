"""Inputs of checks and benchmarks: every element is a function of seed, rank and element index, never of the device.

Numbers come from a counter-based hash in 64-bit integer arithmetic, which wraps alike on every device. A normal is a
sum of eight 16-bit uniforms, an exact integer; it is scaled exactly and rounded to bf16 once. Nothing else is rounded,
so a CPU and a GPU make the same bits. Weights depend on the global expert and not on its rank: one model for any
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mok_cute.errors import ConfigError
from mok_cute.shapes import MoEShape

KINDS = ("normal", "integers")
ROUTINGS = ("random", "zipf", "all-to-one", "empty-rank")  # and file:PATH
FILE_PREFIX = "file:"

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: consecutive counters lie far apart
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the SplitMix64 finalizer
_SECOND_HASH = 0xD1B54A32D192ED03
_STREAMS = {
    name: number
    for number, name in enumerate(
        (
            "x",
            "d_y",
            "routed_gate",
            "routed_up",
            "routed_down",
            "shared_gate",
            "shared_up",
            "shared_down",
            "shared_factor",
            "choice",
            "dropped",
            "topk_weights",
            "popularity",
            "single_expert",
        ),
        start=1,
    )
}
_UNIFORMS = 8
_SUM_MEAN = _UNIFORMS * 65535 // 2  # 262140: the centred sum needs 18 bits and a sign
_SUM_STD = math.sqrt(_UNIFORMS * (2**32 - 1) / 12)
_SCALE_BITS = 6  # 18 bits of sum times 6 bits of scale fill the 24 bits of an FP32 number and no more
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}  # of the 64-bit temporaries: in cache, and in memory


class RankInputs(NamedTuple):
    """What one rank passes to the layer."""

    x: Tensor  # (tokens, hidden) bf16
    topk_ids: Tensor  # (tokens, topk) int64, or as the routing file has it
    topk_weights: Tensor  # (tokens, topk) FP32, positive, each token's sum is one
    shared_factor: Tensor | None  # (tokens,) FP32 in [0, 1)


class RoutingFile(NamedTuple):
    """One rank's part of a routing file."""

    topk_ids: Tensor  # (tokens, topk) int32 or int64
    topk_weights: Tensor  # (tokens, topk) FP32
    x: Tensor | None  # (tokens, hidden) bf16


def _signed(value: int) -> int:
    """The 64-bit pattern as the signed number that torch.int64 holds."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _MASK
    return value ^ (value >> 31)


def _key(seed: int, stream: str, rank: int = 0) -> int:
    """Where a tensor's counters start: a hash of what it is, so that tensors share no stretch of counters."""
    key = _mix_int(seed + _STEP)
    key = _mix_int(key + _STEP * _STREAMS[stream])
    return _mix_int(key + _STEP * (rank + 1))


def _mix_(z: Tensor) -> Tensor:
    """``_mix_int`` of each element, in place. The shift of int64 copies the sign, so its copies are masked away."""
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, None)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            z *= _signed(factor)
    return z


def _hashes(key: int, start: int, count: int, device: torch.device | str) -> Tensor:
    """(count,) int64: hashes of the counters from ``start`` on."""
    counters = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return _mix_(counters.mul_(_signed(_STEP)).add_(_signed(key)))


def _uniforms(key: int, size: tuple[int, ...], bits: int, device: torch.device | str) -> Tensor:
    """int64 tensor of uniform integers below 2**bits, for small tensors."""
    high = _hashes(key, 0, math.prod(size), device) >> (64 - bits)
    return high.bitwise_and_((1 << bits) - 1).view(size)


def _centred_sums(key: int, start: int, count: int, device: torch.device | str) -> Tensor:
    """(count,) int64 in [-262140, 262140]: eight 16-bit uniforms from two hashes, less their mean."""
    lanes = 0x0000FFFF0000FFFF
    z = _hashes(key, start, count, device)
    total = (z >> 16).bitwise_and_(lanes)  # two lanes of 32 bits, so no sum runs into the next lane
    total += z & lanes
    z = _mix_(z.add_(_signed(_SECOND_HASH)))
    total += (z >> 16).bitwise_and_(lanes)
    total += z.bitwise_and_(lanes)
    low = total & 0xFFFFFFFF
    return low.add_(total >> 32).sub_(_SUM_MEAN)


def _exact_scale(std: float) -> float:
    """The factor with 6 significant bits that brings a centred sum nearest to ``std``: within 1.6 percent."""
    mantissa, exponent = math.frexp(std / _SUM_STD)
    return math.ldexp(round(mantissa * 2**_SCALE_BITS), exponent - _SCALE_BITS)


def _fill(out: Tensor, chunk: Callable[[int, int], Tensor], first_element: int = 0) -> None:
    """Writes ``chunk(element index, count)`` over ``out``, a contiguous tensor, in pieces."""
    flat = out.view(-1)
    step = _CHUNK_ELEMENTS["cuda" if out.is_cuda else "cpu"]
    for start in range(0, flat.numel(), step):
        count = min(step, flat.numel() - start)
        flat[start : start + count] = chunk(first_element + start, count)


def _fill_normal(out: Tensor, key: int, std: float, first_element: int = 0) -> None:
    scale = _exact_scale(std)
    _fill(out, lambda at, n: _centred_sums(key, at, n, out.device).float().mul_(scale), first_element)


def _fill_integers(out: Tensor, key: int, values: tuple[int, ...], first_element: int = 0) -> None:
    """Uniform over ``values``, whose number is a power of two."""
    bits = len(values).bit_length() - 1
    table = torch.tensor(values, dtype=out.dtype, device=out.device)

    def chunk(at: int, count: int) -> Tensor:
        return table[(_hashes(key, at, count, out.device) >> (64 - bits)).bitwise_and_(len(values) - 1)]

    _fill(out, chunk, first_element)


# x of kind `integers` lies in -2..2 and weights in -1..1, so that every partial sum of gate and up, in any order, is an
# integer of at most 2 * hidden: exact in FP32 while hidden is below 2**23. Most values are 0, which keeps
# pre-activations near the bend of silu.
_INTEGER_X = (-2, -1, -1, 0, 0, 1, 1, 2)
_INTEGER_WEIGHTS = (-1, 0, 0, 0, 0, 0, 0, 1)


def _fill_rows(out: Tensor, seed: int, stream: str, rank: int, kind: str) -> None:
    if kind == "normal":
        _fill_normal(out, _key(seed, stream, rank), 1.0)
    else:
        _fill_integers(out, _key(seed, stream, rank), _INTEGER_X)


def _fill_matrix(out: Tensor, seed: int, stream: str, kind: str, first_element: int = 0) -> None:
    """Scaled by the fan-in, the last dimension, so that outputs are about as large as inputs."""
    if kind == "normal":
        _fill_normal(out, _key(seed, stream), out.shape[-1] ** -0.5, first_element)
    else:
        _fill_integers(out, _key(seed, stream), _INTEGER_WEIGHTS, first_element)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"inputs={kind!r}: unknown; choose one of {', '.join(KINDS)}.")


def make_routed_weights(
    shape: MoEShape, rank: int, ranks: int, seed: int, kind: str = "normal", device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up (E_local, I, H), down (E_local, H, I) bf16; NaN for experts beyond those that the rank owns."""
    _check_kind(kind)
    owned, each = shape.owned_experts(rank, ranks), shape.local_experts(ranks)
    gate_size, down_size = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    matrices = []
    for stream, size in (("routed_gate", gate_size), ("routed_up", gate_size), ("routed_down", down_size)):
        stack = torch.empty((each, *size), dtype=torch.bfloat16, device=device)
        _fill_matrix(stack[: len(owned)], seed, stream, kind, first_element=owned.start * math.prod(size))
        stack[len(owned) :] = math.nan
        matrices.append(stack)
    gate, up, down = matrices
    return gate, up, down


def make_shared_weights(
    shape: MoEShape, seed: int, kind: str = "normal", device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor] | None:
    """gate, up (I_s, H), down (H, I_s) bf16, the same on all ranks; None without a shared expert."""
    _check_kind(kind)
    if not shape.shared_intermediate:
        return None
    gate_size, down_size = (shape.shared_intermediate, shape.hidden), (shape.hidden, shape.shared_intermediate)
    matrices = []
    for stream, size in (("shared_gate", gate_size), ("shared_up", gate_size), ("shared_down", down_size)):
        matrix = torch.empty(size, dtype=torch.bfloat16, device=device)
        _fill_matrix(matrix, seed, stream, kind)
        matrices.append(matrix)
    gate, up, down = matrices
    return gate, up, down


def make_d_y(
    shape: MoEShape, rank: int, tokens: int, seed: int, kind: str = "normal", device: torch.device | str = "cpu"
) -> Tensor:
    """(tokens, hidden) bf16: a gradient of y to start backward from."""
    _check_kind(kind)
    d_y = torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=device)
    _fill_rows(d_y, seed, "d_y", rank, kind)
    return d_y


def make_rank_inputs(
    shape: MoEShape,
    rank: int,
    ranks: int,
    tokens: int,
    seed: int,
    kind: str = "normal",
    routing: str = "random",
    device: torch.device | str = "cpu",
    *,
    drop_fraction: float = 0.0,
) -> RankInputs:
    """What ``rank`` of ``ranks`` passes to the layer. With routing ``file:PATH``, ``tokens`` is only the maximum.

    random      distinct experts, all equally likely
    zipf        distinct experts, the n-th most popular one n times less likely than the first
    all-to-one  every route of every token of every rank to one expert
    empty-rank  no route to the last rank that owns experts; where only one rank owns any, none to odd experts
    Choices repeat where a token has more of them than there are experts. ``drop_fraction`` of them become -1.
    """
    _check_kind(kind)
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank={rank}: 0 to {ranks - 1} with ranks={ranks}; pass another.")
    if tokens < 0:
        raise ConfigError(f"tokens={tokens}: at least 0; pass another.")
    if not 0 <= drop_fraction <= 1:
        raise ConfigError(f"drop_fraction={drop_fraction}: 0 to 1; pass another.")
    x: Tensor | None = None
    if routing.startswith(FILE_PREFIX):
        topk_ids, topk_weights, x = load_routing_file(routing[len(FILE_PREFIX) :], shape, rank, tokens, device)
        tokens = topk_ids.shape[0]
    else:
        topk_ids = _make_ids(shape, rank, ranks, tokens, seed, routing, device)
        topk_weights = _make_topk_weights(shape, rank, tokens, seed, device)
    if drop_fraction:
        draws = _uniforms(_key(seed, "dropped", rank), (tokens, shape.topk), 32, device)
        topk_ids = topk_ids.masked_fill(draws < int(drop_fraction * 2**32), -1)
    if x is None:
        x = torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=device)
        _fill_rows(x, seed, "x", rank, kind)
    factor = None
    if shape.shared_factor:
        factor = _uniforms(_key(seed, "shared_factor", rank), (tokens,), 16, device).float().mul_(2.0**-16)
    return RankInputs(x, topk_ids, topk_weights, factor)


def _make_topk_weights(shape: MoEShape, rank: int, tokens: int, seed: int, device: torch.device | str) -> Tensor:
    """Integers over their sum: both exact in FP32 (255 routes of at most 2**16), so one division rounds."""
    parts = _uniforms(_key(seed, "topk_weights", rank), (tokens, shape.topk), 16, device).add_(1)
    return parts.float() / parts.sum(dim=1, keepdim=True).float()


def _make_ids(
    shape: MoEShape, rank: int, ranks: int, tokens: int, seed: int, routing: str, device: torch.device | str
) -> Tensor:
    experts = shape.num_experts
    if routing == "all-to-one":
        chosen = _key(seed, "single_expert") % experts
        return torch.full((tokens, shape.topk), chosen, dtype=torch.int64, device=device)
    if routing == "random":
        chances = [1] * experts
    elif routing == "zipf":
        by_popularity = sorted(range(experts), key=lambda expert: _key(seed, "popularity", expert))
        place = {expert: n for n, expert in enumerate(by_popularity, start=1)}
        chances = [max(1, 2**24 // place[expert]) for expert in range(experts)]
    elif routing == "empty-rank":
        last_owner = shape.owner(experts - 1, ranks)
        if last_owner:
            chances = [int(shape.owner(expert, ranks) != last_owner) for expert in range(experts)]
        else:
            chances = [int(expert % 2 == 0) for expert in range(experts)]
    else:
        raise ConfigError(f"routing={routing!r}: unknown; choose one of {', '.join(ROUTINGS)}, {FILE_PREFIX}PATH.")
    return _draw_experts(chances, _key(seed, "choice", rank), tokens, shape.topk, device)


def _draw_experts(chances: list[int], key: int, tokens: int, topk: int, device: torch.device | str) -> Tensor:
    """(tokens, topk) int64: experts drawn with integer chances, without repeats while any expert is left."""
    all_chances = torch.tensor(chances, dtype=torch.int64, device=device)
    left = all_chances.expand(tokens, -1).clone()
    draws = _uniforms(key, (topk, tokens), 48, device)
    ids = torch.empty((tokens, topk), dtype=torch.int64, device=device)
    allowed = sum(chance > 0 for chance in chances)
    for k in range(topk):
        if k % allowed == 0:
            left.copy_(all_chances.expand(tokens, -1))
        ends = left.cumsum(dim=1)
        draw = draws[k] % ends[:, -1]
        ids[:, k] = (ends <= draw[:, None]).sum(dim=1)
        left.scatter_(1, ids[:, k : k + 1], 0)
    return ids


def load_routing_file(
    path: str | Path, shape: MoEShape, rank: int, max_tokens: int | None = None, device: torch.device | str = "cpu"
) -> RoutingFile:
    """``ids.R``, ``weights.R`` and, where it is there, ``x.R`` of a safetensors file for R = ``rank``."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ConfigError(f"routing=file:{path}: no such file; pass a safetensors file.")
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            names = set(file.keys())
            missing = {f"ids.{rank}", f"weights.{rank}"} - names
            if missing:
                raise ConfigError(f"routing=file:{path}: {', '.join(sorted(missing))} missing for rank {rank}; add it.")
            ids, weights = file.get_tensor(f"ids.{rank}"), file.get_tensor(f"weights.{rank}")
            x = file.get_tensor(f"x.{rank}") if f"x.{rank}" in names else None
    except SafetensorError as error:
        raise ConfigError(f"routing=file:{path}: not a readable safetensors file: {error}") from error
    _check_routing(path, shape, rank, ids, weights, x)
    if max_tokens is not None and ids.shape[0] > max_tokens:
        raise ConfigError(f"routing=file:{path}: rank {rank} has {ids.shape[0]} tokens, tokens={max_tokens}; raise it.")
    return RoutingFile(ids, weights, None if x is None else x.to(torch.bfloat16))


def _check_routing(
    path: str | Path, shape: MoEShape, rank: int, ids: Tensor, weights: Tensor, x: Tensor | None
) -> None:
    where = f"routing=file:{path}"
    if ids.ndim != 2 or ids.shape[1] != shape.topk or ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"{where}: ids.{rank} is {tuple(ids.shape)} {ids.dtype}: (tokens, {shape.topk}) of int32 or "
            "int64; change it."
        )
    if weights.shape != ids.shape or weights.dtype != torch.float32:
        raise ConfigError(
            f"{where}: weights.{rank} is {tuple(weights.shape)} {weights.dtype}: {tuple(ids.shape)} of float32; "
            "change it."
        )
    if x is not None and (x.shape != (ids.shape[0], shape.hidden) or not x.is_floating_point()):
        raise ConfigError(
            f"{where}: x.{rank} is {tuple(x.shape)} {x.dtype}: ({ids.shape[0]}, {shape.hidden}) of bf16; change it."
        )
