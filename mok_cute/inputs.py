"""Inputs and routings for checks: they depend on seed, rank and element index, never on the device.

Every random number is a hash of its element's index. From there to the last rounding only integer operations, exact
scalings and single IEEE operations are used, so a CPU and a GPU make the same bits. Expert weights hang on the global
expert number and not on the rank, so the same model can be spread over any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mok_cute.errors import ConfigError
from mok_cute.reference import LayerInputs, Weights
from mok_cute.shapes import MoEShape

KINDS = ("normal", "integers")
ROUTINGS = ("random", "zipf", "all-to-one", "empty-rank")
FILE_PREFIX = "file:"
CHUNK_ELEMENTS = 1 << 21  # int64 temporaries of 16 MiB stay in a GPU's second-level cache

# Kind "integers": |x| <= 4 and |w| <= 2, so every partial sum of gate and up is an integer of at most 8 * H, below 2^24
# for any H below 2^21: gate and up are exact in fp32 whatever the order of the sum. The down projection is not, since
# its input passed silu.
INTEGER_X, INTEGER_WEIGHT = 4, 2

_WORD = 0xFFFFFFFF
_FIELD_BITS, _FIELDS_PER_WORD, _NORMAL_WORDS = 10, 3, 4
_NORMAL_FIELDS = _FIELDS_PER_WORD * _NORMAL_WORDS


@dataclass(frozen=True)
class InputSpec:
    """What to make. ``tokens`` per rank; with a routing file the counts come from the file and these are the maximum.

    kind           normal: x ~ N(0, 1), weights ~ N(0, 1 / fan_in); integers: see INTEGER_X
    routing        one of ROUTINGS, or file:PATH (safetensors: ids.R, weights.R, optional x.R for each rank R)
    drop_percent   share of routes whose id becomes -1
    """

    shape: MoEShape
    tokens: tuple[int, ...]
    seed: int = 0
    kind: str = "normal"
    routing: str = "random"
    drop_percent: int = 0
    ids_dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        def rule(ok: bool, argument: str, text: str) -> None:
            if not ok:
                raise ConfigError(f"InputSpec: {argument}={getattr(self, argument)!r}: {text}; set {argument}.")

        rule(len(self.tokens) >= 1 and min(self.tokens, default=0) >= 0, "tokens", "one count of at least 0 per rank")
        rule(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}")
        is_file = self.routing.startswith(FILE_PREFIX)
        rule(is_file or self.routing in ROUTINGS, "routing", f"one of {', '.join(ROUTINGS)}, {FILE_PREFIX}PATH")
        rule(0 <= self.drop_percent <= 100, "drop_percent", "0 to 100")
        rule(not (is_file and self.drop_percent), "drop_percent", "a routing file states its own -1 routes: must be 0")
        rule(self.ids_dtype in (torch.int32, torch.int64), "ids_dtype", "torch.int32 or torch.int64")

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def routing_file(self) -> RoutingFile | None:
        if not self.routing.startswith(FILE_PREFIX):
            return None
        return RoutingFile.load(Path(self.routing.removeprefix(FILE_PREFIX)), self.shape, self.tokens)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of each rank: ``tokens``, or what the routing file holds."""
        file = self.routing_file
        return self.tokens if file is None else tuple(ids.shape[0] for ids in file.ids)


@dataclass(frozen=True)
class RoutingFile:
    """A routing read from a safetensors file, one entry per rank, on the CPU."""

    ids: list[Tensor]  # (T, K) int32 or int64
    weights: list[Tensor]  # (T, K) fp32
    xs: list[Tensor | None]  # (T, H) bf16 (fp32 and fp16 files are rounded to it), None where the file has none

    @classmethod
    def load(cls, path: Path, shape: MoEShape, max_tokens: tuple[int, ...]) -> RoutingFile:
        """Read and check the entries of all ranks; ConfigError names the file, the entry and the rule."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"routing={FILE_PREFIX}{path}: not a readable safetensors file: {error}.") from error

        def entry(name: str, dtypes: tuple[torch.dtype, ...], columns: int, num_tokens: int | None) -> Tensor:
            if name not in entries:
                raise ConfigError(f"routing={FILE_PREFIX}{path}: {name} is missing; each of the ranks needs it.")
            tensor = entries[name]
            rows = num_tokens if num_tokens is not None else (tensor.shape[0] if tensor.dim() else 0)
            if tuple(tensor.shape) != (rows, columns) or tensor.dtype not in dtypes:
                raise ConfigError(
                    f"routing={FILE_PREFIX}{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}; write "
                    f"{' or '.join(map(str, dtypes))} of shape ({rows if num_tokens is not None else 'T'}, {columns})."
                )
            return tensor

        result = cls([], [], [])
        for rank, limit in enumerate(max_tokens):
            ids = entry(f"ids.{rank}", (torch.int32, torch.int64), shape.topk, None)
            count = ids.shape[0]
            if count > limit:
                raise ConfigError(
                    f"routing={FILE_PREFIX}{path}: ids.{rank} holds {count} tokens, the maximum is {limit}; raise --tokens."
                )
            result.ids.append(ids)
            result.weights.append(entry(f"weights.{rank}", (torch.float32,), shape.topk, count))
            has_x = f"x.{rank}" in entries
            x_dtypes = (torch.bfloat16, torch.float32, torch.float16)
            result.xs.append(entry(f"x.{rank}", x_dtypes, shape.hidden, count).bfloat16() if has_x else None)
        return result


class RankInputs(NamedTuple):
    """What one rank passes to the layer."""

    x: Tensor  # (T, H) bf16
    topk_ids: Tensor  # (T, K) int32 or int64
    topk_weights: Tensor  # (T, K) fp32, positive, each token's summing to one up to rounding
    routed: Weights  # gate, up (E_local, I, H), down (E_local, H, I) bf16; NaN where the rank owns no expert
    shared: Weights | None  # gate, up (I_s, H), down (H, I_s) bf16, the same on all ranks
    shared_factor: Tensor | None  # (T,) fp32 between 0 and 1


def make_rank(spec: InputSpec, rank: int, device: torch.device | str = "cpu") -> RankInputs:
    """Everything that one rank passes to the layer, made on ``device``."""
    device = torch.device(device)
    tokens = spec.token_counts[rank]
    file = spec.routing_file
    if file is None:
        topk_ids, topk_weights = routes(spec, rank, device), router_weights(spec, rank, device)
    else:
        topk_ids, topk_weights = file.ids[rank].to(device), file.weights[rank].to(device)
    file_x = None if file is None else file.xs[rank]
    x = file_x.to(device) if file_x is not None else activations(spec, rank, device)
    shared_factor = None
    if spec.shape.shared_factor:
        low = _hash(tokens, _key(spec.seed, "shared_factor", rank), device) & 0xFFFF
        shared_factor = (2 * low + 1).float() / 2**17
    return RankInputs(x, topk_ids, topk_weights, routed_weights(spec, rank, device), shared_weights(spec, device), shared_factor)


def make_all(spec: InputSpec, device: torch.device | str = "cpu") -> LayerInputs:
    """The inputs of all ranks as the reference takes them."""
    ranks = [make_rank(spec, rank, device) for rank in range(spec.ep_size)]
    return LayerInputs(
        xs=[r.x for r in ranks],
        topk_ids=[r.topk_ids for r in ranks],
        topk_weights=[r.topk_weights for r in ranks],
        routed=[r.routed for r in ranks],
        num_experts=spec.shape.num_experts,
        shared=[r.shared for r in ranks if r.shared is not None] or None,
        shared_factors=[r.shared_factor for r in ranks if r.shared_factor is not None] or None,
        swiglu_limit=spec.shape.swiglu_limit,
    )


def activations(spec: InputSpec, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """x of a rank, (T, H) bf16."""
    return _matrix(spec, ("x", rank), (spec.token_counts[rank], spec.shape.hidden), 1.0, INTEGER_X, device)


def output_gradients(spec: InputSpec, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """d_y of a rank, (T, H) bf16: normal scaled by H^-0.5, or small integers."""
    size = (spec.token_counts[rank], spec.shape.hidden)
    return _matrix(spec, ("d_y", rank), size, 1 / math.sqrt(spec.shape.hidden), INTEGER_X, device)


def routed_weights(spec: InputSpec, rank: int, device: torch.device | str = "cpu") -> Weights:
    """Gate, up (E_local, I, H) and down (E_local, H, I) of a rank's experts, bf16; NaN for experts beyond its own."""
    shape = spec.shape
    local, owned = shape.local_experts(spec.ep_size), shape.owned_experts(rank, spec.ep_size)

    def stacked(name: str, rows: int, columns: int) -> Tensor:
        result = torch.full((local, rows, columns), math.nan, dtype=torch.bfloat16, device=device)
        for place, expert in enumerate(owned):
            _fill(result[place], spec, (name, expert), 1 / math.sqrt(columns), INTEGER_WEIGHT)
        return result

    return (
        stacked("gate", shape.intermediate, shape.hidden),
        stacked("up", shape.intermediate, shape.hidden),
        stacked("down", shape.hidden, shape.intermediate),
    )


def shared_weights(spec: InputSpec, device: torch.device | str = "cpu") -> Weights | None:
    """Gate, up (I_s, H) and down (H, I_s) bf16 of the shared expert, the same on all ranks; None without one."""
    width, hidden = spec.shape.shared_intermediate, spec.shape.hidden
    if not width:
        return None

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return _matrix(spec, (name, "shared"), (rows, columns), 1 / math.sqrt(columns), INTEGER_WEIGHT, device)

    return matrix("gate", width, hidden), matrix("up", width, hidden), matrix("down", hidden, width)


def router_weights(spec: InputSpec, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """(T, K) fp32, positive, a token's weights summing to one: integers over their sum, both exact, one division."""
    tokens, topk = spec.token_counts[rank], spec.shape.topk
    uniform = _hash(tokens * topk, _key(spec.seed, "router", rank), device) & 0xFFFF
    integers = (1 + ((uniform * uniform) >> 16)).view(tokens, topk)  # at most 2^16 - 1, and topk at most 255
    return integers.float() / integers.sum(1, keepdim=True).float()


def routes(spec: InputSpec, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """(T, K) expert ids of a rank by the spec's routing.

    random       the experts of the largest hashed scores: distinct, all alike
    zipf         distinct experts, drawn in proportion to 1 / (e + 1); a repeat moves on to the next unused expert
    all-to-one   every route of every token to one expert
    empty-rank   as random, but one rank's experts get nothing; with one rank that owns experts, its upper half
    Where fewer experts are allowed than a token has routes, they repeat.
    """
    ids = _ROUTES[spec.routing](spec, rank, torch.device(device))
    if spec.drop_percent:
        dropped = _hash(ids.numel(), _key(spec.seed, "drop", rank), device) % 100 < spec.drop_percent
        ids = torch.where(dropped.view(ids.shape), -1, ids)
    return ids.to(spec.ids_dtype)


def empty_experts(spec: InputSpec) -> range:
    """The global experts that the routing empty-rank leaves without routes; never all of them."""
    shape, ep_size = spec.shape, spec.ep_size
    owners = shape.owner(shape.num_experts - 1, ep_size) + 1
    if owners > 1:
        return shape.owned_experts(_key(spec.seed, "empty rank")[0] % owners, ep_size)
    return range((shape.num_experts + 1) // 2, shape.num_experts)


def _random_routes(spec: InputSpec, rank: int, device: torch.device) -> Tensor:
    return _top_scores(spec, rank, torch.arange(spec.shape.num_experts, device=device))


def _empty_rank_routes(spec: InputSpec, rank: int, device: torch.device) -> Tensor:
    empty = empty_experts(spec)
    allowed = [expert for expert in range(spec.shape.num_experts) if expert not in empty]
    return _top_scores(spec, rank, torch.tensor(allowed, device=device))


def _top_scores(spec: InputSpec, rank: int, allowed: Tensor) -> Tensor:
    """For each token the K allowed experts of the largest hashed scores; a hash of each route when there are fewer."""
    tokens, topk, count = spec.token_counts[rank], spec.shape.topk, allowed.numel()
    key = _key(spec.seed, "routes", rank)
    if topk > count:
        return allowed[_hash(tokens * topk, key, allowed.device) % count].view(tokens, topk)
    scores = _hash(tokens * count, key, allowed.device).view(tokens, count)
    # Equal scores would leave the choice to the device's sort: the expert's place makes all of a token's differ.
    unique = scores * count + torch.arange(count, device=allowed.device)
    return allowed[unique.topk(topk, dim=1).indices]


def _zipf_routes(spec: InputSpec, rank: int, device: torch.device) -> Tensor:
    """Draw each route from an integer distribution, then move the routes that repeat an earlier one of their token."""
    tokens, topk, num_experts = spec.token_counts[rank], spec.shape.topk, spec.shape.num_experts
    ends, total = [], 0
    for expert in range(num_experts):
        total += 2**20 // (expert + 1) + 1
        ends.append(total)
    draws = _hash(tokens * topk, _key(spec.seed, "routes", rank), device) * total >> 32
    ids = torch.searchsorted(torch.tensor(ends, device=device), draws, right=True).view(tokens, topk)
    if topk > num_experts:
        return ids
    for k in range(1, topk):
        for _ in range(k):  # after k steps at most, a place that none of the k earlier routes holds
            repeats = (ids[:, :k] == ids[:, k : k + 1]).any(1)
            ids[:, k] = torch.where(repeats, (ids[:, k] + 1) % num_experts, ids[:, k])
    return ids


def _all_to_one_routes(spec: InputSpec, rank: int, device: torch.device) -> Tensor:
    expert = _key(spec.seed, "one expert")[0] % spec.shape.num_experts
    return torch.full((spec.token_counts[rank], spec.shape.topk), expert, device=device)


_ROUTES: dict[str, Callable[[InputSpec, int, torch.device], Tensor]] = {
    "random": _random_routes,
    "zipf": _zipf_routes,
    "all-to-one": _all_to_one_routes,
    "empty-rank": _empty_rank_routes,
}


def _matrix(
    spec: InputSpec, name: tuple[object, ...], size: tuple[int, int], scale: float, bound: int, device: torch.device | str
) -> Tensor:
    result = torch.empty(size, dtype=torch.bfloat16, device=device)
    _fill(result, spec, name, scale, bound)
    return result


def _fill(out: Tensor, spec: InputSpec, name: tuple[object, ...], scale: float, bound: int) -> None:
    """Fill a contiguous bf16 tensor by the spec's kind: normal times ``scale``, or integers up to ``bound``."""
    key = _key(spec.seed, *name)
    flat = out.view(-1)
    assert flat.numel() <= _WORD, "an element's index is one 32-bit word of the hash"
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        part = flat[start : start + CHUNK_ELEMENTS]
        if spec.kind == "integers":
            part.copy_(_hash(part.numel(), key, out.device, start) % (2 * bound + 1) - bound)
        else:
            part.copy_(_normal(part.numel(), key, out.device, start) * scale)


def _normal(count: int, key: tuple[int, int], device: torch.device | str, start: int) -> Tensor:
    """(count,) fp32, near N(0, 1) and within 6: a sum of 12 ten-bit uniforms, centred and scaled exactly.

    One uniform of 0 to 1023 has the variance (1024^2 - 1) / 12, so twice the sum has a standard deviation of 2048.
    """
    total = torch.full((count,), -_NORMAL_FIELDS * (2**_FIELD_BITS - 1), dtype=torch.int64, device=device)
    mask = 2**_FIELD_BITS - 1
    word = _hash(count, key, device, start)
    for step in range(_NORMAL_WORDS):
        for place in range(_FIELDS_PER_WORD):
            total += ((word >> (_FIELD_BITS * place)) & mask) << 1
        if step + 1 < _NORMAL_WORDS:
            word = _mixed((word + 0x9E3779B9) & _WORD)
    return total.float() / 2**11


def _key(seed: int, *name: object) -> tuple[int, int]:
    """Two 32-bit words that name a stream of numbers."""
    digest = hashlib.sha256(repr((seed, *name)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _hash(count: int, key: tuple[int, int], device: torch.device | str, start: int = 0) -> Tensor:
    """(count,) int64 of 0 to 2^32 - 1: hashes of the indices from ``start`` on."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return _mixed(_mixed(index ^ key[0]) ^ key[1])


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64. Both factors are below 2^31, so that no product overflows."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _WORD
    return word ^ (word >> 15)
