"""`disagg bench handoff`: two nodes that share a request, compared with the decode engine alone in the same run."""

from pathlib import Path

from disaggregated_inference.bench.node_pairs import best_first_token, exposed_transfer_ms, hand_over_in_turn
from disaggregated_inference.bench.prompts import resolve_model, text_prompt
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.bench.streaming import bench_streaming
from disaggregated_inference.bench.vllm_handoff import bench_vllm
from disaggregated_inference.engines import require_engine
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.local_nodes import LocalNode, generate_disaggregated, running

_PROMPTS = (128, 512, 2000)
_TOKENS = 32


def run(
    shape: str,
    device: str,
    model: str,
    prefill: str,
    decode: str,
    chunk: int,
    streams: int,
    repeats: int,
    alone: bool,
    output: Path,
) -> Report:
    if prefill == "vllm" and not shape:
        raise BadRequest("--prefill vllm needs a --shape: qwen3-30b-a3b, gpt-oss-120b, or tiny on a CPU")
    if prefill == "vllm":
        report = bench_vllm(shape, chunk or 8192, streams, repeats, alone)
    elif shape:
        report = bench_streaming(shape, device, chunk or 8192, streams, repeats)
    else:
        report = bench_pair(model, prefill, decode, chunk or 256, streams, repeats)
    name = "-".join(filter(None, ("handoff", "vllm" if prefill == "vllm" else "", shape)))
    return report.publish(output / f"{name}.json")


def bench_pair(model_name: str, prefill: str, decode: str, chunk: int, streams: int, repeats: int) -> Report:
    """In float32: tokens can be compared, and no engine has a dtype that suits it better."""
    for name in (prefill, decode):
        require_engine(name)
    model = resolve_model(model_name)
    report = Report(f"{prefill} reads, {decode} writes {_TOKENS} tokens, {model.name}, float32, chunks of {chunk}")
    progress(f"starting {prefill} and {decode} nodes")
    shared = ("--model", str(model.path), "--dtype", "float32", "--prefix-memory", "0")
    fetching = (*shared, "--kv-streams", str(streams))
    prefill_node = LocalNode("prefill", prefill, "--chunk", str(chunk), *shared)
    raw_node = LocalNode("decode", decode, *fetching)
    int8_node = LocalNode("decode", decode, *fetching, "--kv-codec", "int8")
    with running([prefill_node, raw_node, int8_node]):
        for length in _PROMPTS:
            progress(f"prompt of {length} tokens")
            _rows(report, prefill_node, raw_node, text_prompt(model, length), repeats)
        progress("KV transfer as int8")
        _int8_rows(report, prefill_node, raw_node, int8_node, text_prompt(model, 512))
    return report


def _rows(report: Report, prefill: LocalNode, decode: LocalNode, tokens: list[int], repeats: int) -> None:
    alone, (handed,) = hand_over_in_turn([prefill], decode, tokens, _TOKENS, repeats)
    against, name = f"{decode.engine} alone", f"prompt {len(tokens)}"
    report.add(Row(f"{name}, first token", best_first_token(handed), "s", best_first_token(alone), against))
    total, bare_total = (min(one.total_s for one in each) for each in (handed, alone))
    report.add(Row(f"{name}, whole answer", total, "s", bare_total, against))
    report.add(Row(f"{name}, exposed transfer", exposed_transfer_ms(handed), "ms"))
    overhead = min(one.first_token_s - one.node_metrics.prefill_time for one in handed)
    report.add(Row(f"{name}, first token less the prefill itself", overhead * 1e3, "ms"))


def _int8_rows(report: Report, prefill: LocalNode, raw: LocalNode, int8: LocalNode, tokens: list[int]) -> None:
    exact, rounded = (generate_disaggregated(prefill, node, tokens, _TOKENS) for node in (raw, int8))
    pairs = zip(exact.token_ids, rounded.token_ids, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(exact.token_ids), len(rounded.token_ids)))
    sizes = (rounded.node_metrics.kv_bytes, exact.node_metrics.kv_bytes)
    report.add(Row("int8, prompt 512: bytes on the wire", sizes[0] / 1e6, "MB", sizes[1] / 1e6, "raw"))
    report.add(Row("int8, prompt 512: tokens until the first that differs", same, "", len(exact.token_ids), "raw"))
