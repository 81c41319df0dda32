"""Models for tests of slices: a small GPT, tied or not, frozen in part, with dropout or BatchNorm."""

import torch
from torch import nn


class Block(nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self, width: int, *, unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.spare = nn.Linear(width, width) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.cumsum(self.mix(self.norm(x)), dim=1) / x.shape[1]
        return x + self.down(torch.tanh(self.up(x)))


class Tiny(nn.Module):
    """Byte-level language model."""

    def __init__(self, *, depth: int = 3, width: int = 12, tied: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width, unused=unused) for _ in range(depth))
        self.head = nn.Linear(width, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny(dtype: torch.dtype = torch.float64, **settings) -> Tiny:
    torch.manual_seed(3)
    return Tiny(**settings).to(dtype)


class Tokens(torch.utils.data.Dataset):
    """Rows of tokens, and what follows each of them."""

    def __init__(self, count: int = 48, length: int = 7) -> None:
        generator = torch.Generator().manual_seed(9)
        self.rows = torch.randint(0, 17, (count, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


def sum_loss(model: nn.Module, batch) -> tuple[torch.Tensor, int]:
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()
