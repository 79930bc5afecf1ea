"""bfloat16 against float32 on forced continuations: the differences of logits, and how often the best token agrees.

    python benchmarks/bf16_logits.py [--tokens 64]

The float32 model writes each continuation greedily. Then both models score the same tokens, position by position.
"""

import argparse
import json
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from engine.device.attention import Span
from engine.device.kv_cache import KVCache
from engine.device.model import Batch, Model
from engine.models.store import prepare

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain what a GPU does.",
    "List three colours.",
    "Count from one to ten.",
    "Say hello in Spanish.",
    "What is two plus two?",
    "Tell me a short story about a cat.",
)


def logits_of(model: Model, cache: KVCache, ids: Sequence[int], first: int) -> torch.Tensor:
    """Logits [len(ids) - first, vocab] after each of ids[first:], from one forward pass over all ids."""
    batch = Batch(
        list(ids), (), (Span(0, len(ids), range(-(-len(ids) // cache.block_size))),), list(range(first, len(ids)))
    )
    return model.forward(batch, cache, model.attention(cache)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = prepare(args.model)
    device = torch.device("cpu")
    tokenizer = Tokenizer.from_file(str(stored.path / "tokenizer.json"))
    models = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Model.load(
            stored.path, stored.config, dtype=dtype, device=device, max_batch_size=64, max_batch_tokens=256
        )
        models[dtype] = (model, KVCache(stored.config, 32, 16, dtype, device))
    agreed, total, largest, drift = 0, 0, 0.0, 0.0
    for prompt in PROMPTS:
        ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids
        first = len(ids) - 1
        for _ in range(args.tokens):
            ids.append(int(logits_of(*models[torch.float32], ids, len(ids) - 1)[0].argmax()))
        exact, rounded = (logits_of(*models[dtype], ids[:-1], first) for dtype in (torch.float32, torch.bfloat16))
        difference = (exact - rounded).abs()
        largest, drift = max(largest, float(difference.max())), drift + float(difference.mean()) * len(exact)
        agreed += int((exact.argmax(-1) == rounded.argmax(-1)).sum())
        total += len(exact)
    print(
        json.dumps(
            {
                "model": args.model,
                "positions": total,
                "largest_logit_difference": round(largest, 4),
                "mean_logit_difference": round(drift / total, 4),
                "top1_agreement": round(agreed / total, 4),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
