"""The host's time for a call of the layer on a GPU from Python: torch.ops.moelith.moe beside an empty custom operator of
the same signature, the same results and an autograd formula, and moelith.functional.moe and an nn.Module on top. Prints
microseconds a call; MOELITH_COMMIT is noted in OUT.json.

PYTHONPATH=build/cuda/python python bench/cuda/host_cost.py [OUT.json]
"""

import datetime
import json
import os
import statistics
import sys
import time

import torch

from moelith import LayerConfig, MoE, functional, operators

TOKENS, CALLS, ROUNDS = 64, 200, 15  # the device keeps up, or its queue takes them


def empty_like_moe(config):
    """moelith::moe without the layer, as one writes an operator: it only makes the results."""
    signature = str(operators.moe._schema)
    arguments = signature[signature.index("("):]

    library = torch.library.Library("moelith_bench", "DEF")
    library.define("empty" + arguments)

    def run(x, *_others):
        return (
            x.new_empty(x.shape),
            x.new_empty((x.shape[0], config.top_k), dtype=torch.int32),
            x.new_empty((x.shape[0], config.top_k), dtype=torch.float32),
            x.new_empty((config.num_experts,), dtype=torch.int64),
            x.new_empty((), dtype=torch.float32),
            x.new_empty((), dtype=torch.float32),
            x.new_empty((64,), dtype=torch.uint8),
        )

    @torch.library.custom_op("moelith_bench::custom", mutates_args=(), schema=arguments)
    def custom(*given):
        return run(*given)

    # As ours has: PyTorch's way through it costs half as much again, also where nothing needs a gradient.
    custom.register_autograd(lambda context, *gradients: (None,) * 15)

    library.impl("empty", run, "CUDA")
    return library, custom


def microseconds(call):
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(times)


def main():
    torch.manual_seed(0)
    config = LayerConfig(hidden_size=256, intermediate_size=128, num_experts=32, top_k=4)
    layer = MoE(config, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(TOKENS, 256, dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(TOKENS, 32, device="cuda")
    weights = [layer.gate_up_proj.detach(), layer.down_proj.detach()]
    captured = []
    original = operators.moe

    class Spy:
        def __call__(self, *arguments):
            captured.append(arguments)
            return original(*arguments)

    operators.moe = Spy()
    with torch.no_grad():
        functional.moe(x, config=config, gate_up_proj=weights[0], down_proj=weights[1], router_logits=logits)
    operators.moe = original
    arguments = captured[0]
    library, custom = empty_like_moe(config)
    trained = (x.clone().requires_grad_(), *arguments[1:-1], True)
    with torch.no_grad():
        result = {
            "moelith::moe": microseconds(lambda: original(*arguments)),
            "empty custom operator": microseconds(lambda: custom(*arguments)),
            "empty operator of torch.library": microseconds(lambda: torch.ops.moelith_bench.empty(*arguments)),
            "functional.moe": microseconds(lambda: functional.moe(
                x, config=config, gate_up_proj=weights[0], down_proj=weights[1], router_logits=logits)),
            "MoE module (with the router's product)": microseconds(lambda: layer(x)),
        }
    result["moelith::moe, gradients wanted"] = microseconds(lambda: original(*trained))
    result["empty custom operator, gradients wanted"] = microseconds(lambda: custom(*trained))
    result["moelith::moe without an empty custom operator"] = result["moelith::moe"] - result["empty custom operator"]
    for name, value in result.items():
        print(f"{name:46} {value:7.1f} us")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"command": "bench/cuda/host_cost.py", "commit": os.environ.get("MOELITH_COMMIT", "unknown"),
                       "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
                       "torch": torch.__version__, "tokens": TOKENS, "microseconds": result}, file, indent=1)


if __name__ == "__main__":
    main()
