"""One forward of a small layer on two virtual ranks of one GPU, compared with the reference. Needs a Hopper GPU."""

import torch

from mok_cute import MoEShape, functional, inputs, reference

RANKS, TOKENS = 2, [300, 129]  # token counts may differ between ranks

shape = MoEShape.preset("tiny")
given = [inputs.make_rank_inputs(shape, r, RANKS, TOKENS[r], seed=0, device="cuda") for r in range(RANKS)]
routed = [
    functional.RoutedWeights(*inputs.make_routed_weights(shape, r, RANKS, seed=0, device="cuda")) for r in range(RANKS)
]
shared_weights = inputs.make_shared_weights(shape, seed=0, device="cuda")
assert shared_weights is not None, "tiny has a shared expert"
shared = [functional.SharedWeights(*shared_weights)] * RANKS

xs, ids, weights = [g.x for g in given], [g.topk_ids for g in given], [g.topk_weights for g in given]
workspaces = functional.create_workspaces(shape, ep_size=RANKS, max_tokens=max(TOKENS))
schedules = functional.build_schedules(workspaces, ids)
outputs = functional.forward_ranks(workspaces, schedules, xs, weights, routed, shared)

expected = reference.forward(shape, xs, ids, weights, routed, shared)
for rank, ((y, _), wanted) in enumerate(zip(outputs, expected, strict=True)):
    error = torch.linalg.norm(y.float() - wanted) / torch.linalg.norm(wanted)
    print(f"rank {rank}: y {tuple(y.shape)}, relative error {float(error):.2e}")
