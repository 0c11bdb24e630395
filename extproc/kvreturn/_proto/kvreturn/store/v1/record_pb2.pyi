from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("version", "key_id", "nonce", "sealed", "deflated")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    DEFLATED_FIELD_NUMBER: _ClassVar[int]
    version: int
    key_id: bytes
    nonce: bytes
    sealed: bytes
    deflated: bool
    def __init__(self, version: _Optional[int] = ..., key_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., sealed: _Optional[bytes] = ..., deflated: _Optional[bool] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("keys", "ttl", "handle", "reason", "decode_node", "prefill_node", "put_at", "prompt", "turns", "returned", "pending", "trace", "conversation", "brought")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    PUT_AT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    ttl: float
    handle: bytes
    reason: str
    decode_node: str
    prefill_node: str
    put_at: int
    prompt: int
    turns: int
    returned: int
    pending: bool
    trace: str
    conversation: bytes
    brought: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., ttl: _Optional[float] = ..., handle: _Optional[bytes] = ..., reason: _Optional[str] = ..., decode_node: _Optional[str] = ..., prefill_node: _Optional[str] = ..., put_at: _Optional[int] = ..., prompt: _Optional[int] = ..., turns: _Optional[int] = ..., returned: _Optional[int] = ..., pending: _Optional[bool] = ..., trace: _Optional[str] = ..., conversation: _Optional[bytes] = ..., brought: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "keys", "conversation")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    conversation: bytes
    def __init__(self, id: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., conversation: _Optional[bytes] = ...) -> None: ...
