"""The models of the parity tests with their data; models.cpp has the same under
the same names. A few hundred to a few thousand parameters each."""

import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 10     # of a vector
WORDS = 30     # in the vocabulary
LENGTH = 12    # words in a text
CLASSES = 5


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)))


class Cnn(nn.Module):
    # The convolutions have no bias: batch norm makes its gradient zero up to
    # rounding, and Adam would make a whole step of that.
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean([2, 3]))


class Lstm(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, sparse=sparse)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        states, _ = self.lstm(self.embedding(x))
        return self.head(states[:, -1])


class Transformer(nn.Module):
    HEADS = 2
    SIZE = 16

    # Query, key and value have no bias: the gradient of the keys' bias is zero
    # up to rounding.
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, self.SIZE)
        self.position = nn.Parameter(torch.zeros(LENGTH, self.SIZE))
        self.norm1 = nn.LayerNorm(self.SIZE)
        self.qkv = nn.Linear(self.SIZE, 3 * self.SIZE, bias=False)
        self.projection = nn.Linear(self.SIZE, self.SIZE)
        self.norm2 = nn.LayerNorm(self.SIZE)
        self.wide = nn.Linear(self.SIZE, 4 * self.SIZE)
        self.narrow = nn.Linear(4 * self.SIZE, self.SIZE)
        self.head = nn.Linear(self.SIZE, WORDS)

    def attention(self, x):
        batch = x.size(0)
        q, k, v = (
            part.view(batch, LENGTH, self.HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.SIZE // self.HEADS)
        mixed = torch.softmax(scores, -1) @ v
        return self.projection(
            mixed.transpose(1, 2).reshape(batch, LENGTH, self.SIZE))

    def forward(self, x):
        x = self.embedding(x) + self.position
        x = x + self.attention(self.norm1(x))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.head(x)


class Branch(nn.Module):
    """`side` is used where the batch's first number is positive (or always),
    which differs between ranks; `spare` never is."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always
        self.trunk = nn.Linear(WIDTH, 16)
        self.side = nn.Linear(16, 16)
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        if self.always or x.flatten()[0].item() > 0:
            h = torch.tanh(self.side(h))
        return self.head(h)


MODELS = {
    "mlp": Mlp,
    "cnn": Cnn,
    "lstm": Lstm,
    "sparse_lstm": lambda: Lstm(sparse=True),
    "transformer": Transformer,
    "branch": Branch,
    "static_branch": lambda: Branch(always=True),
}


def make_data(model, samples, dtype):
    """All samples and their targets: numbers of `dtype`, or classes."""
    if model == "cnn":
        x = torch.randn(samples, 1, 8, 8, dtype=torch.double)
        return x.to(dtype), (x.sum([1, 2, 3]).long() % CLASSES).abs()
    if model.endswith("lstm"):
        x = torch.randint(WORDS, (samples, LENGTH))
        return x, x.sum(1) % CLASSES
    if model == "transformer":
        x = torch.randint(WORDS, (samples, LENGTH))
        return x, x.roll(-1, dims=1)
    x = torch.randn(samples, WIDTH, dtype=torch.double)
    return x.to(dtype), torch.sin(x.sum(1, keepdim=True)).to(dtype)


def loss_of(prediction, target):
    if target.is_floating_point():
        return F.mse_loss(prediction, target)
    return F.cross_entropy(prediction.flatten(0, -2), target.flatten())
