"""`model_type` "gemma3n", Gemma 3n: text, images and sound: the text model's facts are in `gemma3n_text`."""

from girih.arch import gemma3n_text
from girih.arch._nested import text_family

UNCOUNTED = "the towers for images and sound"
weight_shapes, kv_cache_specs, max_model_len = text_family(gemma3n_text)
