"""`model_type` "llama4", Llama 4: text and images: the text model's facts are in `llama4_text`."""

from girih.arch import llama4_text
from girih.arch._nested import text_family

UNCOUNTED = "the image tower"
weight_shapes, kv_cache_specs, max_model_len = text_family(llama4_text)
