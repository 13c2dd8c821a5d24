"""A worker: one device, one model, its share of the KV cache. Knows neither scheduler nor engine."""
