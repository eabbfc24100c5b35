"""c10d-like layer."""
