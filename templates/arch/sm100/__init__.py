"""Blackwell: tcgen05, accumulators in tensor memory, CTA pairs."""
