"""The command line: `kvreturn serve | up | envoy-config | sim | demo | analyze`."""
