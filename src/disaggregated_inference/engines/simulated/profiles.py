"""Timing profiles of machines, from published figures if possible. Estimates are marked and give their arithmetic.

Prefill of n tokens takes a n + b n²: constant work per token, plus attention to all earlier ones. A step's time has
three parts: the weights that one sequence reads, the experts that each further sequence adds, and every row of context.
"""

from collections.abc import Callable

import msgspec

from disaggregated_inference.errors import BadRequest

EXPERTS = 128  # of both mixtures
_EXPERTS_PER_TOKEN = {"qwen3-30b-a3b": 8, "gpt-oss-120b": 4}
_SHORT, _LONG = 8192, 32768  # the prompts for which figures are published


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with a model. With all zeros nothing takes time."""

    name: str
    note: str
    prefill_token_s: float = 0.0
    prefill_depth_s: float = 0.0  # times the square of the prompt length
    step_s: float = 0.0  # of one sequence without context
    context_token_s: float = 0.0  # per row that a step reads
    expert_s: float = 0.0  # per further expert that a larger batch reads
    experts_per_token: int = 0
    answer_tokens: int = 0  # average length of a completion; 0: it never ends by itself
    chunk_tokens: int = 2048
    power_w: float | None = None  # published maximum of the machine; None: not known
    idle_power_w: float | None = None
    line_gbps: float | None = None  # of its fastest network port

    def prefill_s(self, start: int, stop: int) -> float:
        """To prefill tokens `start` to `stop` after those before them."""
        return self.prefill_token_s * (stop - start) + self.prefill_depth_s * (stop**2 - start**2)

    def batch_step_s(self, sequences: int, context_tokens: int) -> float:
        """One token for each sequence; `context_tokens` is the sum over all sequences."""
        return self.step_s + self.expert_s * self._more_experts(sequences) + self.context_token_s * context_tokens

    def _more_experts(self, sequences: int) -> float:
        """Experts beyond those of one sequence, if tokens choose their experts at random."""
        unread = (1 - self.experts_per_token / EXPERTS) ** sequences
        return EXPERTS * (1 - unread) - self.experts_per_token


# Published: NVIDIA's 140 W of a GB10 and 200 Gb/s of its ConnectX-7; Apple's support page 102027, at the wall, and its
# 10 GbE (ESTIMATE: an M3 Ultra takes what an M2 Ultra takes); NVIDIA's 700 W of an H200 SXM and 400 Gb/s of a DGX H200.
_HARDWARE: dict[str, dict[str, float]] = {
    "dgx-spark": {"power_w": 140, "line_gbps": 200},
    "m2-ultra": {"power_w": 295, "idle_power_w": 10, "line_gbps": 10},
    "m3-ultra": {"power_w": 295, "idle_power_w": 10, "line_gbps": 10},
    "h200": {"power_w": 700, "line_gbps": 400},
}


def _fitted(
    name: str,
    shape: str,
    note: str,
    prefill_s: tuple[float, float],
    decode_tokens_per_s: tuple[float, float],
    expert_ms: float,
    chunk_tokens: int = 2048,
) -> Profile:
    """Fitted through two published points: prompts of 8,192 and 32,768 tokens, and decoding after them."""
    pace = [seconds / length for seconds, length in zip(prefill_s, (_SHORT, _LONG), strict=True)]
    steps = [1 / rate for rate in decode_tokens_per_s]
    depth_s = (pace[1] - pace[0]) / (_LONG - _SHORT)
    context_s = (steps[1] - steps[0]) / (_LONG - _SHORT)
    return Profile(
        name=name,
        note=note,
        prefill_token_s=pace[0] - depth_s * _SHORT,
        prefill_depth_s=depth_s,
        step_s=steps[0] - context_s * _SHORT,
        context_token_s=context_s,
        expert_s=expert_ms / 1000,
        experts_per_token=_EXPERTS_PER_TOKEN[shape],
        chunk_tokens=chunk_tokens,
        power_w=_HARDWARE[name].get("power_w"),
        idle_power_w=_HARDWARE[name].get("idle_power_w"),
        line_gbps=_HARDWARE[name].get("line_gbps"),
    )


def _spark(shape: str, prefill_s: tuple[float, float], decode: tuple[float, float], expert_ms: float) -> Profile:
    note = (
        "llama.cpp on one GB10 (its benches/dgx-spark; GPT-OSS in MXFP4, Qwen3-Coder in Q8_0): prompts and single"
        " answers at 8k and 32k. Batches from its llama-batched-bench with 32 sequences of 512 tokens: 102.4 ms a step"
        " for GPT-OSS, 92.8 for Qwen, less one sequence's step (17.4; 16.7) and the context (3.1; 8.5), over the 77.6"
        " and 103.7 further experts of 32 random choices: 1.055 and 0.651 ms for each. The sum itself is an estimate"
    )
    return _fitted("dgx-spark", shape, note, prefill_s, decode, expert_ms)


def _ultra(name: str, shape: str, prefill_s: tuple[float, float], decode: tuple[float, float], ms: float) -> Profile:
    measured = "llama.cpp on an M2 Ultra, 800 GB/s (its benches/mac-m2-ultra): prompts and single answers at 8k and 32k"
    taken = "" if name == "m2-ultra" else " ESTIMATE: taken as they are for an M3 Ultra, whose memory has 819 GB/s."
    note = f"{measured}.{taken} ESTIMATE: a further expert costs a Spark's time by bandwidth, times 273 / 800"
    return _fitted(name, shape, note, prefill_s, decode, ms)


def _h200() -> Profile:
    note = (
        "this project's torch engine on one H200, random weights (README): 46,170 and 27,901 tok/s at 8k and 32k (at"
        " 1,500, 32k tok/s, the fit gives 56k); steps of 10.35 ms alone and 13.16 ms for 32, 1,500 tokens of context"
        " each. ESTIMATE: a row of context takes 98,304 bytes / 4.8 TB/s, and the other (13.16 - 10.35 - 0.95) ms are"
        " 103.7 experts"
    )
    row_s = 98_304 / 4.8e12
    decode = tuple(1 / (0.01035 + row_s * (context - 1500)) for context in (_SHORT, _LONG))
    return _fitted(
        "h200", "qwen3-30b-a3b", note, (8192 / 46170, 32768 / 27901), (decode[0], decode[1]), 0.0179, chunk_tokens=8192
    )


_QWEN, _GPT_OSS = "qwen3-30b-a3b", "gpt-oss-120b"

MACHINES: dict[str, dict[str, Profile]] = {
    "dgx-spark": {
        _QWEN: _spark(_QWEN, (3.0, 17.4), (48.0, 30.2), 0.651),
        _GPT_OSS: _spark(_GPT_OSS, (3.5, 16.9), (52.9, 42.8), 1.055),
    },
    **{
        name: {
            _QWEN: _ultra(name, _QWEN, (4.7, 44.4), (65.1, 45.3), 0.222),
            _GPT_OSS: _ultra(name, _GPT_OSS, (5.5, 32.5), (78.2, 65.5), 0.360),
        }
        for name in ("m2-ultra", "m3-ultra")
    },
    "h200": {_QWEN: _h200()},
}
INSTANT = Profile(name="instant", note="no time passes: what remains is this project's overhead")
_CUSTOM = Profile(name="custom", note="rates given by hand, the same at every length and in every batch")


def parse_profile(text: str, shape: str) -> Profile:
    """`m3-ultra`, `instant`, `custom:prefill=2000,decode=50`; any of them with settings behind a colon."""
    name, _, settings = text.partition(":")
    profile = _named(name, shape)
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        profile = _set(profile, key.strip(), value)
    if name == "custom" and not (profile.prefill_token_s and profile.step_s):
        raise BadRequest("a custom profile needs both rates: custom:prefill=2000,decode=50 (tokens per second)")
    return profile


def _named(name: str, shape: str) -> Profile:
    plain = {"instant": INSTANT, "custom": _CUSTOM}
    if name in plain:
        return plain[name]
    if name not in MACHINES:
        known = ", ".join([*MACHINES, "instant", "custom:prefill=2000,decode=50"])
        raise BadRequest(f"unknown profile {name!r}: choose {known}")
    if shape not in MACHINES[name]:
        known = ", ".join(MACHINES[name])
        raise BadRequest(
            f"no figures for {shape} on {name}, only for {known}; give rates: custom:prefill=2000,decode=50"
        )
    return MACHINES[name][shape]


_SETTINGS: dict[str, Callable[[float], dict[str, float]]] = {
    "prefill": lambda rate: {"prefill_token_s": 1 / rate, "prefill_depth_s": 0.0},
    "decode": lambda rate: {"step_s": 1 / rate, "context_token_s": 0.0, "expert_s": 0.0},
    "answer": lambda tokens: {"answer_tokens": int(tokens)},
    "chunk": lambda tokens: {"chunk_tokens": int(tokens)},
}


def line_gbps(one: Profile, other: Profile) -> float | None:
    """Between two machines: that of the slower port; None: not known."""
    rates = (one.line_gbps, other.line_gbps)
    return min(rate for rate in rates if rate) if all(rates) else None


def _set(profile: Profile, key: str, value: str) -> Profile:
    try:
        number = float(value)
        if not 1e-3 <= number <= 1e9 or (key in ("answer", "chunk") and number < 1):
            raise ValueError
        changes = _SETTINGS[key](number)
    except (KeyError, ValueError):
        raise BadRequest(
            f"profile setting {key}={value}: there are {', '.join(_SETTINGS)}; prefill and decode in tokens per second,"
            " answer and chunk in tokens"
        ) from None
    return msgspec.structs.replace(profile, **changes)
