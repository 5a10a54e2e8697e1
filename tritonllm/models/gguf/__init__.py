"""GGUF files: their header, what they say of the model, their tensors under the names that Hugging Face's files use."""
