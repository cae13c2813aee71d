"""Reading checkpoints: safetensors headers, indexes, the Hugging Face cache, and which tensors are a table."""
