"""Results return to their owners and are summed."""
