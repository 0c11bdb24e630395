"""vLLM plugin around NixlConnector: handles on streams, proven reads, bounded pins, loud configuration."""

__version__ = "0.1.0"
