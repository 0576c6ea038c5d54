"""GEMM tiles of the experts: which operands, and the main loop per machine."""
