"""The activation between the two GEMMs of an expert."""
