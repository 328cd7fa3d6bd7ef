"""DeepSpeed's third stage, whose optimizer steps once for each of several groups of weights; 20 steps of 2 batches."""

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
deepspeed.init_distributed("gloo")
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "sub_group_size": 100_000},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=settings)
for _ in range(40):
    engine.backward(engine(torch.randn(8, 256)).square().mean())
    engine.step()
torch.distributed.destroy_process_group()
