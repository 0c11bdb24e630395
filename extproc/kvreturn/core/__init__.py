"""The sans-IO core: bytes and events in, decisions out. Imports no gRPC, no asyncio, no sockets and no clock."""
