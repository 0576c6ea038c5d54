"""From accumulators to global memory."""
