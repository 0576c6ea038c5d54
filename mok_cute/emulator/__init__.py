"""A virtual GPU: compiled CuTe DSL kernels run on the CPU from the PTX that the compiler emits."""
