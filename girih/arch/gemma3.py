"""`model_type` "gemma3", Gemma 3 from 4B on: text and images: the text model's facts are in `gemma3_text`."""

from girih.arch import gemma3_text
from girih.arch._nested import text_family

UNCOUNTED = "the image tower"
weight_shapes, kv_cache_specs, max_model_len = text_family(gemma3_text)
