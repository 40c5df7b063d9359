"""Where models are asked: a cluster by the public client, or any OpenAI-compatible server."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from typing import Any, Protocol, Self

import msgspec

from disaggregated_inference.errors import DeadlineExceeded, DisaggError, ModelNotFound
from grader.errors import GraderError
from grader.models.settings import ModelSettings
from grader.timeouts import EndpointTimeouts

ALL_UP = "all up"
_TRY_LATER = (408, 409, 425, 429)  # besides 5xx
_NOT_FOUND, _TIMED_OUT = 404, 504
# For llguidance in our nodes: no token is spent on indentation. Other servers may refuse a word that they do not know.
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_HEADERS = {"Content-Type": "application/json", "X-Disagg-Metrics": "1"}  # the second is for our gateway


class ModelsUnavailable(GraderError):
    """The models cannot be reached now. The same question may be asked again later."""


class AnswerRefused(GraderError):
    """This question gets no answer, also later: it is too long, or the endpoint does not allow it."""


class AnswerTooSlow(GraderError):
    """The answer did not come within the time limit."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one model."""

    model: str
    messages: list[dict[str, str]]
    schema: dict[str, Any]
    seed: int
    temperature: float
    max_tokens: int
    timeout_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one answer. An endpoint that is not ours reports tokens alone. None: not reported."""

    total_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float | None = None
    transfer_s: float | None = None  # exposed: after the end of the prefill
    decode_s: float | None = None
    prefill_speed: float | None = None  # tokens per second
    decode_speed: float | None = None
    first_token_s: float | None = None
    kv_bytes: int | None = None
    method: str | None = None
    prefill_node: str | None = None
    decode_node: str | None = None
    served_model: str | None = None
    weights: tuple[str, ...] = ()  # hashes of the weights of the nodes that answered; empty: not told
    warning: str | None = None


class RawAnswer(msgspec.Struct, frozen=True):
    """`reused`: of an earlier grading. Its time did not pass now."""

    text: str
    figures: Figures
    reused: bool = False


class Endpoint(Protocol):
    def ask(self, question: Question) -> RawAnswer: ...

    def health(self, *models: str) -> dict[str, Any]:
        """`verdicts`: what can be said of each of these models now. `ALL_UP`: it can answer."""
        ...

    def close(self) -> None: ...


def connect(settings: ModelSettings) -> "Endpoint":
    return HttpEndpoint(settings.endpoint) if settings.endpoint else ClusterEndpoint(settings.config)


def require_models(settings: ModelSettings) -> None:
    """Before a batch: the cluster file is there and knows both models. Nodes may be away; they are waited for."""
    if settings.endpoint:
        return
    with closing(ClusterEndpoint(settings.config)) as cluster:
        for name in (settings.code_model, settings.feedback_model):
            cluster.require(name)


class ClusterEndpoint(AbstractContextManager["ClusterEndpoint"]):
    """The cluster of a cluster file, by `DisaggregatedClient`."""

    def __init__(self, config: str = "", cache_salt: str | None = None) -> None:
        """`cache_salt`: cached prefixes are shared only with requests of the same salt."""
        from disaggregated_client import DisaggregatedClient  # a second of imports that only this endpoint needs

        self._client, self._salt = DisaggregatedClient(config or None), cache_salt

    def require(self, model: str) -> None:
        """Raises ModelNotFound for a model that the cluster file does not have."""
        self._client.config.resolve_model(model)

    def ask(self, question: Question) -> RawAnswer:
        started = time.monotonic()
        try:
            metrics = self._last_metrics(question)
        except DisaggError as error:
            raise _as_ours(error) from error
        figures = figures_of(metrics, time.monotonic() - started)
        return RawAnswer(metrics["response"], msgspec.structs.replace(figures, weights=self._weights(figures)))

    def _weights(self, figures: Figures) -> tuple[str, ...]:
        nodes = {node.name: node.weights for node in self._client.cluster_status().nodes}
        told = [nodes.get(name or "", "") for name in (figures.prefill_node, figures.decode_node)]
        return tuple(dict.fromkeys(each for each in told if each))

    def _last_metrics(self, question: Question) -> dict[str, Any]:
        """By a stream: it says at once when no node is left, where a plain call would wait for one to come back."""
        deltas = self._client.stream(
            model=question.model,
            messages=list(question.messages),
            format={"type": "json_schema", "schema": question.schema | _COMPACT},
            seed=question.seed,
            temperature=question.temperature,
            max_tokens=question.max_tokens,
            timeout=question.timeout_s,
            cache_salt=self._salt,
        )
        with closing(deltas):
            for delta in deltas:
                if delta.waiting:
                    raise ModelsUnavailable(f"no node of the cluster can answer for {question.model} now")
                if delta.metrics is not None:
                    return delta.metrics
        raise ModelsUnavailable("the cluster ended the answer early")

    def health(self, *models: str) -> dict[str, Any]:
        """Every node is asked now."""
        health, verdicts = self._client.health(), self._client.cluster_status().models
        return health | {"verdicts": {name: self._verdict(name, verdicts) for name in models}}

    def _verdict(self, model: str, verdicts: Mapping[str, str]) -> str:
        try:
            return str(verdicts[self._client.config.resolve_model(model)])
        except ModelNotFound:
            return "the cluster file does not name it"

    def close(self) -> None:
        self._client.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_ours(error: DisaggError) -> GraderError:
    if isinstance(error, DeadlineExceeded):
        return AnswerTooSlow(str(error))
    if error.status >= 500 or error.status in _TRY_LATER:
        return ModelsUnavailable(str(error))
    return AnswerRefused(str(error))


def figures_of(metrics: dict[str, Any], total_s: float) -> Figures:
    """Of our own metrics, from the client or from the gateway."""
    return Figures(
        total_s=metrics.get("total_time") or total_s,
        prompt_tokens=metrics.get("prompt_tokens") or 0,
        completion_tokens=metrics.get("completion_tokens") or 0,
        cached_tokens=metrics.get("cached_tokens") or 0,
        prefill_s=metrics.get("prefill_time"),
        transfer_s=metrics.get("exposed_transfer_time"),
        decode_s=metrics.get("decode_time"),
        prefill_speed=metrics.get("prefill_speed"),
        decode_speed=metrics.get("decode_speed"),
        first_token_s=metrics.get("first_token_time"),
        kv_bytes=metrics.get("kv_bytes"),
        method=metrics.get("method"),
        prefill_node=metrics.get("prefill_node"),
        decode_node=metrics.get("decode_node"),
        served_model=metrics.get("node_model") or metrics.get("model"),
        warning=metrics.get("warning"),
    )


class HttpEndpoint(AbstractContextManager["HttpEndpoint"]):
    """Any server with OpenAI's chat completions. Our gateway adds the figures of the cluster."""

    def __init__(self, url: str, key: str = "", timeouts: EndpointTimeouts = EndpointTimeouts()) -> None:
        self._url, self._timeouts = url.rstrip("/"), timeouts
        self._key = key or os.environ.get("GRADER_API_KEY", "")
        self._tells_weights = True

    def __enter__(self) -> Self:
        return self

    def ask(self, question: Question) -> RawAnswer:
        started = time.monotonic()
        reply = self._request("/chat/completions", _body(question), question.timeout_s)
        try:
            text = reply["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ModelsUnavailable(f"{self._url} sent an answer without a message") from None
        storable = str(text).encode("utf-8", "replace").decode()  # JSON may have halves of surrogate pairs
        figures = _figures(reply, time.monotonic() - started)
        return RawAnswer(storable, msgspec.structs.replace(figures, weights=self._weights(question.model)))

    def _weights(self, model: str) -> tuple[str, ...]:
        """As our gateway tells them in its list of models. An endpoint that does not is asked once."""
        if not self._tells_weights:
            return ()
        try:
            listed: Any = self._request("/models", None, self._timeouts.list_s).get("data")
            found = {one["id"]: one.get("weights") for one in listed if isinstance(one, dict) and "id" in one}
        except (GraderError, TypeError, AttributeError):
            return ()
        self._tells_weights = any(found.values())
        told = found.get(model.removeprefix("disaggregated:"))
        return tuple(str(each) for each in told) if isinstance(told, list) else ()

    def health(self, *models: str) -> dict[str, Any]:
        """The names of its models; more is not asked of a server that may not be ours."""
        reply = self._request("/models", None, self._timeouts.list_s)
        found = [model.get("id", "") for model in reply.get("data", [])]
        known = {name: name.removeprefix("disaggregated:") in found for name in models}
        verdicts = {name: ALL_UP if named else "the endpoint does not name it" for name, named in known.items()}
        return {"models": found, "verdicts": verdicts}

    def close(self) -> None:
        """It keeps no connection."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        headers = _HEADERS | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                reply: dict[str, Any] = json.load(response)
                return reply
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except TimeoutError:
            raise AnswerTooSlow(f"{self._url} did not answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise ModelsUnavailable(f"{self._url}: {getattr(error, 'reason', error)}") from None

    def _refusal(self, error: urllib.error.HTTPError) -> GraderError:
        message = f"{self._url} answered {error.code}: {_message(error)}"
        if error.code == _TIMED_OUT:
            return AnswerTooSlow(message)
        if error.code >= 500 or error.code in _TRY_LATER:
            return ModelsUnavailable(message)
        if error.code == _NOT_FOUND:
            message += "; does the URL end in /v1, and has the endpoint this model?"
        return AnswerRefused(message)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason


def _body(question: Question) -> dict[str, Any]:
    schema = {"name": "answer", "schema": question.schema, "strict": True}
    return {
        "model": question.model.removeprefix("disaggregated:"),
        "messages": question.messages,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "seed": question.seed,
        "temperature": question.temperature,
        "max_tokens": question.max_tokens,
    }


def _figures(reply: dict[str, Any], total_s: float) -> Figures:
    if isinstance(metrics := reply.get("disagg"), dict):
        return figures_of(metrics, total_s)
    usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Figures(
        total_s=total_s,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        served_model=reply.get("model"),
    )
