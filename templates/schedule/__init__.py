"""The kernels that build the schedule: publish, count, place."""
