"""Shapes of the transformers among the rows, as predictors of language models want them."""

from typing import NamedTuple

from ..board import Row
from .buckets_and_links import NO_LINKS, PARTS


class Transformer(NamedTuple):
    """Equal blocks of attention and feed-forward layers.

    Attributes:
        hidden: Width of the blocks.
        inner: Width inside the feed-forward layers.
        heads: Attention heads.
        blocks: Number of blocks.
        sequence: Tokens (or patches of an image) of a sample.
        batch: Samples on each GPU in an iteration.
        gated: Whether the feed-forward layers have three matrices (SwiGLU) in place of two.
        vocabulary: Number of tokens; 0: it has no embedding of tokens.
    """

    hidden: int
    inner: int
    heads: int
    blocks: int
    sequence: int
    batch: int
    gated: bool = False
    vocabulary: int = 0


SHAPES = {
    "bert_base": Transformer(768, 3072, 12, 12, 128, 32, vocabulary=30522),
    "vit_b_16": Transformer(768, 3072, 12, 12, 197, 1024),
    "transformer_231m": Transformer(1024, 4096, 16, 17, 512, 8, vocabulary=16000),
    "gpt2_512": Transformer(768, 3072, 12, 12, 512, 16, vocabulary=50257),
    "gpt2_1024": Transformer(768, 3072, 12, 12, 1024, 8, vocabulary=50304),
    "cs336_xl": Transformer(1600, 6400, 25, 48, 128, 4, gated=True, vocabulary=10000),
}
"""By the callable in `published_models`, without the end of its name that states another batch.

Transformer-XL is not among them: its attention over a memory of former segments and the words of its embedding, which
are most of its parameters, have no place in these shapes.
"""


def transformer_of(row: Row) -> Transformer:
    """Return the shape of the row's model.

    Raises:
        ValueError: It is no transformer of equal blocks, or the row has no links between GPUs.
    """
    if row.part not in PARTS:
        raise ValueError(NO_LINKS)
    callable_name = (row.model or "").rpartition(":")[2]
    name, _, batch = callable_name.partition("_batch_")
    if name not in SHAPES:
        raise ValueError("no transformer of equal blocks")
    return SHAPES[name]._replace(batch=int(batch)) if batch else SHAPES[name]
