"""The ext_proc server: thin adapters around the core."""
