"""Build BERT and GPT-2 from Hugging Face's transformers, untrained, on synthetic text.

The defaults are BERT-base and the smallest GPT-2, on texts of the maximum length.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

_TEXTS = 256  # made once; batches are drawn from them
_MASK, _MASKED = 103, 0.15  # BERT's token [MASK], and the share of tokens that it replaces
_NO_TARGET = -100  # cross entropy ignores this target


def bert(
    vocabulary: int = 30522, length: int = 512, width: int = 768, layers: int = 12, heads: int = 12
) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer for masked language modelling."""
    config = BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    model = BertForMaskedLM(config)  # without a pooler, which would get no gradient from this loss
    texts = torch.randint(vocabulary, (_TEXTS, length))

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        tokens = texts[torch.randint(_TEXTS, (batch,))]
        masked = torch.rand(batch, length) < _MASKED
        return tokens.masked_fill(masked, _MASK), tokens.masked_fill(~masked, _NO_TARGET)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    return model, _cross_entropy, make_batch, optimizer


def gpt2(
    vocabulary: int = 50257, length: int = 1024, width: int = 768, layers: int = 12, heads: int = 12
) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer for next-token prediction."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        use_cache=False,  # the cache of keys and values is useful only for generation
    )
    model = GPT2LMHeadModel(config)
    texts = torch.randint(vocabulary, (_TEXTS, length + 1))

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        tokens = texts[torch.randint(_TEXTS, (batch,))]
        return tokens[:, :-1], tokens[:, 1:]

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    return model, _cross_entropy, make_batch, optimizer


def _cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens that have a target."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
