"""Model of the Qwen3 dense family: its files, weights, tokenizer, KV cache, sampling, and forward pass in PyTorch."""
