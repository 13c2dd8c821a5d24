"""One file per GGUF architecture: its metadata as a Hugging Face config, its tensors as Hugging Face weights.

A family defines `hf_config(gguf) -> dict`, `weight_rules(gguf, config) -> list[WeightRule]` and `CONFIG_TENSORS`, the
GGUF tensors that end up in the config. It also states what the GGUF header leaves out.
"""
