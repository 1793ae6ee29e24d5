"""Dense models, such as Qwen3 and Llama: files, weights, tokenizer, KV cache, sampling, and the forward pass in PyTorch."""
