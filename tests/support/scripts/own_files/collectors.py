"""A module of the user's own that has the name of one of rankscope's folders."""

import torch


def stack(items):
    return torch.stack([item for item, _ in items]), torch.stack([target for _, target in items])
