"""A mixture-of-experts layer in PyTorch: eight routed experts and a shared one learn a function."""

import torch

import moelith

config = moelith.LayerConfig(
    hidden_size=64, intermediate_size=128, num_experts=8, top_k=2, shared_experts=[moelith.SharedExpert(64)],
    router=moelith.Router("sigmoid", renormalize=True, selection_bias=True),
)
layer = moelith.MoE(config)
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
x = torch.randn(512, 64)
for step in range(101):
    out = layer(x, return_routing=True)
    loss = (out.y - torch.sin(2 * x)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    layer.update_selection_bias(out.expert_counts)  # evens out the load of the experts without an auxiliary loss
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}, tokens of each expert {out.expert_counts.tolist()}")
