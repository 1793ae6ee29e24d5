"""Model of the Qwen3 dense family: files, weights, tokenizer, KV cache, sampling, and the forward pass in PyTorch."""
