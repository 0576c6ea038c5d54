"""Device code: the templates that are traced into kernels."""
