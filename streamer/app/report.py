"""What a run says of itself in the end."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from torch import nn

import streamer


@dataclass(frozen=True)
class Summary:
    """One run in figures: losses in nats per token, sizes in bytes, times in seconds."""

    parameters: int
    weight_bytes: int
    device_bytes_peak: int
    host_bytes_per_parameter: float
    tokens_per_second: float
    unigram_loss: float
    first_val_loss: float
    last_val_loss: float
    busy_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    overlap: dict[str, float]

    @staticmethod
    def of(
        model: nn.Module,
        *,
        tokens_per_second: float,
        first_val_loss: float,
        last_val_loss: float,
        unigram_loss: float,
    ) -> Summary:
        """The figures of a wrapped model together with those of its training."""
        streamer.synchronize(model)
        stats = streamer.stats(model)
        params = list(model.parameters())
        parameters = sum(param.numel() for param in params)
        return Summary(
            parameters=parameters,
            weight_bytes=sum(param.nbytes for param in params),
            device_bytes_peak=stats.device_bytes_peak,
            host_bytes_per_parameter=sum(stats.host_bytes.values()) / parameters,
            tokens_per_second=tokens_per_second,
            unigram_loss=unigram_loss,
            first_val_loss=first_val_loss,
            last_val_loss=last_val_loss,
            busy_seconds=dict(stats.busy_seconds),
            exposed_seconds=dict(stats.exposed_seconds),
            overlap=dict(stats.overlap),
        )

    def as_json(self) -> dict[str, object]:
        """The figures as JSON values; an overlap that is NaN (an idle lane) is null."""
        overlap = {lane: None if math.isnan(value) else value for lane, value in self.overlap.items()}
        return asdict(self) | {"overlap": overlap}


def summary_table(summary: Summary, *, unit: str = "byte") -> str:
    """The summary as a table for the terminal."""
    # a plain optimizer's two fp32 moments stand beside the weights and their gradients
    resident = 2 * summary.weight_bytes + 8 * summary.parameters
    rows = [
        ("parameters", f"{summary.parameters:,}"),
        ("weights", amount(summary.weight_bytes)),
        ("peak on the device", f"{amount(summary.device_bytes_peak)} with the layers' saved inputs"),
        ("if all were held there", f"{amount(resident)} of weights, gradients and moments"),
        ("host bytes per parameter", f"{summary.host_bytes_per_parameter:.2f}"),
        ("tokens/s", f"{summary.tokens_per_second:,.0f}"),
        ("validation loss before", f"{summary.first_val_loss:.3f} nats per {unit}"),
        ("validation loss after", f"{summary.last_val_loss:.3f}"),
        (f"{unit} frequencies alone", f"{summary.unigram_loss:.3f}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines.append(f"\n{'lane':8}{'busy s':>10}{'exposed s':>12}{'overlap':>10}")
    for lane, busy in summary.busy_seconds.items():
        overlap = "-" if lane == "compute" or not busy else f"{summary.overlap[lane]:.1%}"
        exposed = "-" if lane == "compute" else f"{summary.exposed_seconds[lane]:.2f}"
        lines.append(f"{lane:8}{busy:>10.2f}{exposed:>12}{overlap:>10}")
    return "\n".join(lines)


def amount(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a figure of 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
