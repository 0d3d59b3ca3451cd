"""BERT-Large, built to count its operations: 24 layers of width 1024, 16 heads (Devlin et al. 2018, section 3)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS = 30_522, 1_024, 24, 16
BATCH, TOKENS = 8, 128


class Bert(nn.Module):
    """Encoder and masked-token head, which shares its weights with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(LAYERS)
        ]
        self.layers = nn.Sequential(*layers)
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, tokens, vocabulary)."""
        x = self.layers(self.token(tokens) + self.position(torch.arange(TOKENS)))
        return self.norm(nn.functional.gelu(self.dense(x))) @ self.token.weight.T  # type: ignore[no-any-return]


def large() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Build BERT-Large and its loss, for `--model figures.bert:large`."""
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))

    def loss(module: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())

    loss.batch = BATCH  # type: ignore[attr-defined]  # declares the number of samples of an iteration
    return Bert(), loss
