"""How the engine core reaches its workers: one file per way to run them."""
