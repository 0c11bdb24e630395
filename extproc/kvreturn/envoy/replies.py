"""What clients get where Envoy answers in a node's place: an error in their API's own shape that says what to do."""

from collections.abc import Sequence

from kvreturn.envoy.protos import Any, accesslog_pb, cel_pb, core_pb, hcm_pb, matcher_pb, route_pb

# Flags as in access logs; what the router or a node answers has none of these, and passes as it is.
_NO_ROOM = ("UH", "UO")
_NO_ANSWER = ("UF", "UC", "UR", "LR", "URX", "UT", "UPE")
# Details as Envoy's ext_proc filter has them, and only where it could not go on. The router's own begin with
# `kvreturn_`.
_TOO_LATE = "ext_proc_error_per-message_timeout_exceeded"
_NO_ROUTER = "ext_proc_error"
_Told = tuple[str, str, str]  # a text, and its error's type as OpenAI's APIs and as Anthropic's have it
LATE: _Told = ("the router did not answer in time; try again later", "GatewayTimeout", "timeout_error")
GONE: _Told = (
    (
        "no router could take this request to its end; try again. If this goes on, no router is up: tell who runs "
        "this service"
    ),
    "InternalServerError",
    "api_error",
)
FAILED: _Told = ("internal error", "InternalServerError", "api_error")
_RETRY = core_pb.HeaderValueOption(header=core_pb.HeaderValue(key="retry-after", value="1"))
ANTHROPIC = "/v1/messages"
"""Below it, errors have Anthropic's shape."""


def of_routers() -> hcm_pb.LocalReplyConfig:
    """Bodies for what the ext_proc filter answers itself: 504 if a router takes too long, else 500."""
    late, gone = _mappers(_details(_TOO_LATE), LATE), _mappers(_details(_NO_ROUTER), GONE)
    return hcm_pb.LocalReplyConfig(mappers=[*late, *gone])


def of_routers_and_decode_nodes() -> hcm_pb.LocalReplyConfig:
    """The same, and bodies for what no decode node has answered."""
    nodes = [
        mapper
        for flags, text in (
            (_NO_ROOM, "no decode node is up or has room (%RESPONSE_FLAGS%); try again later"),
            (
                _NO_ANSWER,
                "a decode node did not answer (%RESPONSE_FLAGS%); try again: if there are others, one of them is asked",
            ),
        )
        for mapper in _mappers(_flags(flags), (text, "ServiceUnavailableError", "api_error"))
    ]
    return hcm_pb.LocalReplyConfig(mappers=[*of_routers().mappers, *nodes])


def bodies(told: _Told, code: str = "%RESPONSE_CODE%") -> list[str]:
    """An error as OpenAI's APIs have it, and as Anthropic's has it."""
    text, openai, anthropic = told
    return [
        f'{{"error":{{"message":"kvreturn: {text}","type":"{openai}","param":null,"code":{code}}}}}\n',
        f'{{"type":"error","error":{{"type":"{anthropic}","message":"kvreturn: {text}"}}}}\n',
    ]


def _mappers(which: accesslog_pb.AccessLogFilter, told: _Told) -> list[hcm_pb.ResponseMapper]:
    """Bodies for some of Envoy's own answers, in both shapes."""
    openai, anthropic = bodies(told)
    return [_mapper(which, ANTHROPIC, anthropic), _mapper(which, "/", openai)]


def _mapper(which: accesslog_pb.AccessLogFilter, prefix: str, body: str) -> hcm_pb.ResponseMapper:
    return hcm_pb.ResponseMapper(
        filter=accesslog_pb.AccessLogFilter(and_filter=accesslog_pb.AndFilter(filters=[which, _below(prefix)])),
        body_format_override=core_pb.SubstitutionFormatString(
            text_format_source=core_pb.DataSource(inline_string=body), content_type="application/json"
        ),
        headers_to_add=[_RETRY],
    )


def _flags(flags: Sequence[str]) -> accesslog_pb.AccessLogFilter:
    return accesslog_pb.AccessLogFilter(response_flag_filter=accesslog_pb.ResponseFlagFilter(flags=list(flags)))


def _details(begin: str) -> accesslog_pb.AccessLogFilter:
    """Answers whose details begin so; no plain filter of Envoy's looks at them."""
    expression = cel_pb.ExpressionFilter(expression=f"response.code_details.startsWith('{begin}')")
    return accesslog_pb.AccessLogFilter(
        extension_filter=accesslog_pb.ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel", typed_config=Any.pack(expression)
        )
    )


def _below(prefix: str) -> accesslog_pb.AccessLogFilter:
    """Requests below a path."""
    path = route_pb.HeaderMatcher(name=":path", string_match=matcher_pb.StringMatcher(prefix=prefix))
    return accesslog_pb.AccessLogFilter(header_filter=accesslog_pb.HeaderFilter(header=path))
