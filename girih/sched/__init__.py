"""Which request computes what in the next step."""
