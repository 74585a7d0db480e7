"""The engine that samples with vLLM in this process."""
