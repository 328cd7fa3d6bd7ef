"""Accelerate: 40 batches of each rank, two of them for each step of the optimizer."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
loader = DataLoader(TensorDataset(torch.randn(4000, 256)), batch_size=50, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for (rows,) in loader:
    with accelerator.accumulate(net):
        accelerator.backward(net(rows).square().mean())
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
