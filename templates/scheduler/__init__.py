"""Who works on what, in which order."""
