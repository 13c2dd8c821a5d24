"""A worker: one device, one model, its share of the KV cache. Knows neither scheduler nor engine."""

import os

# Before torch loads OpenMP: threads that wait for each other sleep instead of spinning. On a machine with one busy
# core of two, a SmolLM2 decode step took 4.4 s spinning and 0.18 s sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
