"""Train a small BERT with Hugging Face's Trainer to tell which of two tokens is more frequent."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

WORDS = 1000


class Texts(Dataset):
    """Random token sequences. The label is 1 if token 0 occurs more often than token 1."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(WORDS, (self.length,))
        tokens[: self.length // 3] %= 2
        return {"input_ids": tokens, "labels": ((tokens == 0).sum() > (tokens == 1).sum()).long()}


def make_trainer(width: int, layers: int, arguments: TrainingArguments) -> Trainer:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    return Trainer(model=model, args=arguments, train_dataset=Texts(4096, length=64))


class Step(torch.nn.Module):
    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model, self.compute_loss = trainer.model, trainer.compute_loss

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.compute_loss(self.model, batch)


def build(width: int = 128, layers: int = 4):
    trainer = make_trainer(width, layers, TrainingArguments(learning_rate=3e-4, weight_decay=0.01))

    def collate(samples: list):
        batch = trainer.data_collator(samples)
        return batch, batch["labels"]

    loader = torch.utils.data.DataLoader(
        trainer.train_dataset, 32, shuffle=True, collate_fn=collate
    )
    return Step(trainer), lambda loss, _: loss, loader, trainer.create_optimizer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="output")
    args = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=32,
        learning_rate=3e-4,
        weight_decay=0.01,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
    )
    make_trainer(args.width, 4, arguments).train()


if __name__ == "__main__":
    main()
