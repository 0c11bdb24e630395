from kvreturn._proto.envoy.config.core.v3 import base_pb2 as _base_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HTTPAccessLogEntry(_message.Message):
    __slots__ = ("common_properties",)
    COMMON_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    common_properties: AccessLogCommon
    def __init__(self, common_properties: _Optional[_Union[AccessLogCommon, _Mapping]] = ...) -> None: ...

class AccessLogCommon(_message.Message):
    __slots__ = ("response_flags", "metadata")
    RESPONSE_FLAGS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    response_flags: bytes
    metadata: _base_pb2.Metadata
    def __init__(self, response_flags: _Optional[bytes] = ..., metadata: _Optional[_Union[_base_pb2.Metadata, _Mapping]] = ...) -> None: ...
