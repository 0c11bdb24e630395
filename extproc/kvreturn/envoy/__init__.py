"""Envoy: a bootstrap for the configured pools, a lint for anybody's bootstrap, and running the binary.

Nothing is imported here: the bootstrap's protos take about a second to import, and the ext_proc server needs none.
"""
