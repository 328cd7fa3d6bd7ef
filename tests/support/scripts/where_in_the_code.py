"""Two ranks; rank 1 takes 40 ms of a step in `augment`, both 20 ms in `tokenize` of a package and 4 s in `evaluate`."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, AUGMENT_S, TOKENIZE_S = int(sys.argv[1]), 0.04, 0.02

installed = Path.cwd() / "site-packages"  # what lies in such a folder counts as installed
(installed / "tokens").mkdir(parents=True, exist_ok=True)
(installed / "tokens/__init__.py").write_text(
    f"import time\ndef tokenize(batch):\n    time.sleep({TOKENIZE_S})\n    return batch\n"
)
sys.path.append(str(installed))
from tokens import tokenize  # noqa: E402


def augment(batch):
    time.sleep(AUGMENT_S)
    return batch


def load(rank):
    batch = tokenize(torch.randn(8, 64))
    return augment(batch) if rank == 1 else batch


def evaluate(seconds):
    time.sleep(seconds)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        if step in (70, 140):
            evaluate(2)
        model(load(rank)).sum().backward()
        optimizer.step()
    if "--hang" in sys.argv and rank == 0:
        print("HANGS", flush=True)
        evaluate(3600)
    dist.barrier()
    dist.destroy_process_group()


main()
