"""The vLLM nodes: pools, what is known of them, and the prefill leg's client."""
