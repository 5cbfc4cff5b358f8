"""Training steps on a GPU, and epochs of them by the clock."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from batches import rows_of
from harness import Job, report
from torch import nn

__all__ = ["copied_in_the_loop", "device_of", "network_of", "train"]

VOCABULARY = 50_257
WIDTH = 384

Step = Callable[[Any], None]


def device_of(job: Job) -> torch.device:
    """Return where the network is."""
    return torch.device(job.options["device"])


def network_of(job: Job) -> Step:
    """Return the step of a training: forward, backward and the optimizer, for a batch that is on the device.

    It does not wait for the device.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = device_of(job)
    network, loss_of = NETWORKS[job.options["network"]]
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def copied_in_the_loop(batches: Iterable[Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Copy each batch when it is needed, as a loop without `to_device` does."""
    for batch in batches:
        yield {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def train(job: Job, step: Step, epochs: Iterable[Iterable[Any]]) -> None:
    """Train for some epochs and report, of each, its seconds with its start, its steps, and processor time.

    Args:
        job: The job.
        step: The step.
        epochs: The batches of each epoch, on the device. The first one is not timed.
    """
    found = []
    for batches in epochs:
        _wait_for(device_of(job))
        began, processor = time.perf_counter(), _processor_s()
        steps = rows = 0
        first_s = 0.0
        for batch in batches:
            first_s = first_s or time.perf_counter() - began
            step(batch)
            steps += 1
            rows += rows_of(batch)
        _wait_for(device_of(job))
        seconds = time.perf_counter() - began
        found.append(
            {
                "seconds": seconds,
                "first_s": first_s,
                "steps": steps,
                "rows": rows,
                "processor_s": _processor_s() - processor,
            }
        )
    report(epochs=found[1:], first_epoch=found[0], rows=found[-1]["rows"], complete=True, device=_name(job))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(job: Job) -> str:
    device = device_of(job)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _processor_s() -> float:
    """Return the processor time of this process, all its threads: not of workers, which may still run."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# Networks ------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A small language model: four causal transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden: torch.Tensor = self.layers(self.embedding(tokens), mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def _loss_of_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())


def _table() -> nn.Module:
    """Return a network of three layers for rows of numbers."""
    return nn.Sequential(nn.Linear(19, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 1))


def _loss_of_table(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs = torch.stack([*(batch[f"f{number:02}"] for number in range(18)), batch["d0"].float()], 1)
    return nn.functional.mse_loss(model(inputs).squeeze(1).float(), batch["d1"].float())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], torch.Tensor]]] = {
    "tokens": (Tokens, _loss_of_tokens),
    "numbers": (_table, _loss_of_table),
}
"""What makes each network, and what returns its loss."""
