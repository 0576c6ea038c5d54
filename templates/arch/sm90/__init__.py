"""Hopper: wgmma, accumulators in registers."""
