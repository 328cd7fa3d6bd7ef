"""FLOPs that the shapes in a profiler's trace say, and what they are of the devices' peak."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import rankscope


class Block(torch.nn.Module):
    """Two projections, batched products and attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.bmm(self.out(y), x.transpose(1, 2)).sum()


def test_flops_of_forward_and_backward_are_those_of_torchs_own_counter(tmp_path):
    model, x = Block(), torch.randn(8, 32, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    with torch.profiler.profile(record_shapes=True) as profiler:
        model(x).backward()
    profiler.export_chrome_trace(str(tmp_path / "rank0.json"))
    operators = rankscope.open(tmp_path / "rank0.json").table("operators").collect()
    assert operators["flops"].null_count() == 0
    assert set(operators["name"]) >= {"aten::addmm", "aten::mm", "aten::bmm"}
    shape = (8, 4, 32, 16)  # of attention, which torch counts on GPUs only
    attention = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert operators["flops"].sum() == counter.get_total_flops() + attention
