"""A small GPT of Megatron-Core, in its own pipeline schedules, on CPUs.

Megatron-Core asks for CUDA in places where a CPU would do as well: these get a CPU here. All else is Megatron's own.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from functools import partial

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors that are to be made on CUDA are made on the CPU, and say that they are on CUDA when asked for a type."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if name == "type" and isinstance(result, str) else result


class NoGenerators:
    """Megatron's tracker of CUDA's random generators, where there are none."""

    def fork(self, *_):
        return contextlib.nullcontext()


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = torch.cuda.current_stream = lambda *_: None
megatron_random._CUDA_RNG_STATE_TRACKER = NoGenerators()
megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True

SEQUENCE, BATCH, HIDDEN, WORDS = 64, 2, 128, 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=int, default=1, help="stages")
    parser.add_argument("--chunks", type=int, help="of the model on each stage: the interleaved schedule")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--save", help="a folder for a checkpoint after step 4")
    parser.add_argument("--slow-rank", type=int, help="takes 40 ms longer for the forward of each microbatch")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, arguments.pipeline, arguments.chunks)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=arguments.pipeline,
        virtual_pipeline_model_parallel_size=arguments.chunks,
        # As Megatron-LM has it: its backward then calls autograd's engine itself. The interleaved schedule frees an
        # output before its send has ended, which NCCL allows; gloo reads memory that is gone, and now and then aborts.
        deallocate_pipeline_outputs=arguments.chunks is None,
        overlap_p2p_comm=arguments.chunks is not None,
        batch_p2p_comm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    models = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks_of(config)]
    rates = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=False, use_distributed_optimizer=True, clip_grad=1.0)
    optimizer = get_megatron_optimizer(rates, models)
    batches = [iter(lambda: torch.randint(0, WORDS, (BATCH, SEQUENCE + 1)), None) for _ in models]
    slow = dist.get_rank() == arguments.slow_rank
    forward_backward = get_forward_backward_func()
    for step in range(arguments.steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=partial(forward, slow),
            data_iterator=batches if arguments.chunks else batches[0],
            model=models if arguments.chunks else models[0],
            num_microbatches=arguments.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )
        optimizer.step()
        if arguments.save and step == 4:
            own = ShardedTensor.from_rank_offsets(
                "weights", torch.ones(1000), (0, dist.get_rank(), dist.get_world_size())
            )
            dist_checkpointing.save({"weights": own}, arguments.save)
    dist.destroy_process_group()


def chunks_of(config):
    """The parts of the model that this rank's stage holds."""
    for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
        place = {"ignore_virtual": False, "vp_stage": chunk} if config.virtual_pipeline_model_parallel_size else {}
        part = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=WORDS,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=chunk if config.virtual_pipeline_model_parallel_size else None,
        )
        part.model_type = ModelType.encoder_or_decoder
        yield part


def forward(slow, batches, model):
    if slow:
        time.sleep(0.04)
    words = next(batches)
    positions = torch.arange(SEQUENCE).unsqueeze(0).expand(BATCH, -1)
    later = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    return model(words[:, :-1], positions, later, labels=words[:, 1:]), lambda losses: (losses.float().mean(), {})


if __name__ == "__main__":
    with OnCpu():
        main()
