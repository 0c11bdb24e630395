"""kvreturn: brings a decode node's KV cache back to the prefill node, turn after turn."""

__version__ = "0.1.0"
