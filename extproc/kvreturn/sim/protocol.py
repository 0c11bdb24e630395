"""Request bodies, with vLLM's members and checks."""

import json
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvreturn.sim.errors import ApiError

_MAX_REPORTED = 10


class StreamOptions(BaseModel):
    """What a stream tells about usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Request(BaseModel):
    """Members that chat and completions share. Whatever else a client sends is accepted and ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    echo: bool | None = False
    return_token_ids: bool | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk about usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk tells the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Checks that vLLM makes while it parses.

        Raises:
            ApiError: (400)
        """
        if self.stream_options and not self.stream:
            raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")

    def check_sampling(self, max_tokens: int) -> None:
        """Checks that vLLM makes once it knows the prompt's length; `max_tokens` is what that leaves.

        Raises:
            ApiError: (400)
        """
        if max_tokens < 1:
            raise ApiError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
        if self.min_tokens < 0:
            raise ApiError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.min_tokens > max_tokens:
            raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {self.min_tokens}.")
        if self.temperature is not None and not 0 <= self.temperature <= 2:  # noqa: PLR2004 - OpenAI's range
            raise ApiError(f"temperature must be in [0, 2], got {self.temperature}.", param="temperature")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ApiError(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        if (self.n or 1) > 1 and self.temperature == 0:
            raise ApiError(f"n must be 1 when using greedy sampling, got {self.n}.")
        if "" in self.stops:
            raise ApiError("stop cannot contain an empty string.")


class NamedFunction(BaseModel):
    """The function of a named `tool_choice`."""

    name: str


class NamedToolChoice(BaseModel):
    """`tool_choice` that names a function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class FunctionDefinition(BaseModel):
    """What a tool is called and takes."""

    name: str
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class _Rendered(BaseModel):
    """Members that shape a chat prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatRequest(_Rendered, _Request):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True

    @property
    def limit(self) -> int | None:
        """The output limit that counts."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def choice_of_tool(self) -> str:
        """`none`, `auto`, `required` or `named`."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return "named"
        return self.tool_choice or ("auto" if self.tools else "none")

    def definitions(self) -> list[FunctionDefinition]:
        """The tools, checked.

        Raises:
            ApiError: (400) a tool is malformed.
        """
        return [validate(ToolDefinition, tool, "tools").function for tool in self.tools or ()]

    def check(self) -> None:
        """See `_Request.check`."""
        super().check()
        if self.tools == []:
            raise invalid("`tools` must not be an empty array.", "tools")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        names = [definition.name for definition in self.definitions()]
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise invalid(
                "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    logprobs: int | None = None

    def check(self) -> None:
        """See `_Request.check`."""
        super().check()
        if self.prompt is None or self.prompt in ("", []):
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


class TokenizeChatRequest(_Rendered):
    """`POST /tokenize` for a conversation."""

    model: str | None = None
    return_token_strs: bool | None = False


class TokenizeCompletionRequest(BaseModel):
    """`POST /tokenize` for a text."""

    model: str | None = None
    prompt: str
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


M = TypeVar("M", bound=BaseModel)


def invalid(message: str, param: str | None) -> ApiError:
    """A 400 as FastAPI's validation gives it."""
    return ApiError(message, kind=HTTPStatus.BAD_REQUEST.phrase, param=param)


def parse_json(body: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value of a request body.

    Raises:
        ApiError: (400) it is none.
    """
    try:
        return json.loads(body)
    except ValueError as error:
        raise invalid(f"1 validation error:\n  JSON decode error: {error}", "body") from error


def validate(model: type[M], value: object, where: str = "body") -> M:
    """`value` as a `model`.

    Raises:
        ApiError: (400) it is none.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        lines = [f"  {where}.{_path(item['loc'])}: {item['msg']}" for item in found[:_MAX_REPORTED]]
        label = "error" if len(found) == 1 else "errors"
        param = f"{where}.{_path(found[0]['loc'])}".rstrip(".")
        raise invalid(f"{len(found)} validation {label}:\n" + "\n".join(lines), param) from error


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))
