"""DeepSpeed's pipeline engine: two stages, 20 steps of 4 microbatches; stage 1 sleeps 10 ms in each forward."""

import time

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule


class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.01)
        return x


def batches():
    while True:
        yield torch.randn(16, 256), torch.randn(16, 256)


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
deepspeed.init_distributed("gloo")
torch.set_num_threads(1)
layers = [*(LayerSpec(torch.nn.Linear, 256, 256) for _ in range(7)), LayerSpec(Slow)]
net = PipelineModule(
    layers, num_stages=2, loss_fn=lambda out, target: (out - target).square().mean(), partition_method="uniform"
)
settings = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
settings |= {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=settings)
source = batches()
for _ in range(20):
    engine.train_batch(source)
torch.distributed.destroy_process_group()
