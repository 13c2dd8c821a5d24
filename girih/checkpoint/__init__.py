"""Files that hold a model: Hugging Face directories as the native format, GGUF imported into it once. Torch-free."""
