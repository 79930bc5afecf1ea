"""Names that dashboards made for vLLM look for."""

import asyncio

import pytest

from engine.wire.messages import StepDone
from tests.support.gateway.harness import chat_body, eventually, gateway
from tests.support.gateway.metrics import Shown, one_row

pytestmark = pytest.mark.anyio

VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
}


async def test_dashboards_made_for_vllm_find_their_names_types_and_labels() -> None:
    async with gateway() as g:
        shown = Shown(g)
        row = await one_row(g)
        engine = {"model_name": "org/tiny-random", "engine": "0"}
        series = shown.scrape()
        assert {name: kind for name, kind in shown.types.items() if name.startswith("vllm:")} == VLLM
        for name, labels in series:
            if name.startswith("vllm:") and name != "vllm:cache_config_info":
                assert {label: dict(labels)[label] for label in engine} == engine
        assert shown.value("vllm:request_success_total", finished_reason="stop", **engine) == 1
        assert shown.value("vllm:generation_tokens_total", **engine) == row.output_tokens
        assert shown.value("vllm:time_to_first_token_seconds_count", **engine) == 1
        # what the model server protocol of gateway-api-inference-extension reads
        ((_, labels),) = [one for one in series if one[0] == "vllm:cache_config_info"]
        assert (dict(labels)["block_size"], dict(labels)["num_gpu_blocks"]) == ("16", "128")
        task = asyncio.create_task(g.post("/v1/chat/completions", chat_body(max_tokens=5)))
        g.engine.script = None
        await eventually(lambda: g.engine.num_live == 1)
        step = StepDone(step_id=1, duration_us=1, num_running=1, num_waiting=7, num_free_blocks=32)
        g.engine.send(step)
        await eventually(lambda: g.state.engine.latest_step == step)
        assert shown.value("vllm:kv_cache_usage_perc", **engine) == 0.75
        assert shown.value("vllm:num_requests_waiting", **engine) == 7
        g.engine.finish(g.engine.submitted[-1].request_id, "stop")
        await task
        assert shown.value("vllm:num_requests_waiting", **engine) == 0
