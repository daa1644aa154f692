"""What bench/versus.py makes of its measurements: ratios, the verdict on losses, a row for each contender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.common import quartiles
from bench.versus_contenders import PLAIN, PLAIN_BF16, PLAIN_FP32, CannotRun

#: what rounding may do to the mean loss of one batch with the same weights
ROUNDING = {"float32": 1e-4, "bfloat16": 5e-3}
#: what it may do to training: a share of what the plain loss fell by
SHARE = {"float32": 0.002, "bfloat16": 0.02}
#: the share where gradients are not clipped, which is another way to train
SHARE_UNCLIPPED = 0.2


@dataclass(frozen=True)
class Losses:
    """Of the batch that is not trained on, before the first step and after the last."""

    before: float
    after: float


@dataclass(frozen=True)
class Result:
    """All that is known of a contender that went through every round."""

    losses: Losses
    #: of a step, by round
    seconds: list[float]
    #: "at_rest" and "step", or None where nobody counts them
    device_bytes: dict[str, int] | None
    #: "resident", "pinned_by_pytorch" and, of streamer, "counted"
    host_bytes: dict[str, int]
    exact: bool = True
    clips: bool = True
    remark: str = ""


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says; of `CannotRun` what it says."""
    if isinstance(error, CannotRun):
        return str(error)
    lines = str(error).strip().splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))


def verdict(own: Losses, reference: Losses, *, dtype: str, clips: bool) -> str | None:
    """Why ``own`` are not the losses of a contender that trained as ``reference`` did; None if they are.

    Before the first step weights are the same, and what is left is `ROUNDING`: sums in another order change
    the loss by some 1e-6 of it in fp32, bf16 by some 1e-4 in the mean of 512 tokens and by less in that of
    more. After it precision explains `SHARE` of the fall of the plain loss: in 28 steps of a small model on
    the CPU, streamer, FSDP2 and DeepSpeed in bf16 came to within 0.05 % of the fall of fp32 masters, and in
    fp32 to within 0.002 %; the bounds leave a factor of 40 and more to larger models. Who does not train is
    100 % off; a rate wrong by a tenth was 7 % off, half the layers left out 4 %, no clipping 3 %.
    The losses say something only where the plain one fell by much more than rounding: that is asked first.
    """
    fall = reference.before - reference.after
    if not fall > 20 * ROUNDING[dtype]:
        return (
            f"the plain loss went from {reference.before:.4f} to {reference.after:.4f}, too little to "
            "compare with: take more --rounds or a larger --lr"
        )
    if not abs(own.before - reference.before) <= ROUNDING[dtype]:
        return f"its loss begins at {own.before:.4f}, the plain one at {reference.before:.4f}"
    bound = ROUNDING[dtype] + (SHARE[dtype] if clips else SHARE_UNCLIPPED) * fall
    if not abs(own.after - reference.after) <= bound:
        return f"its loss ends at {own.after:.4f}, the plain one at {reference.after:.4f} (+-{bound:.4f})"
    return None


def reference_of(result: Result, results: Mapping[str, Result]) -> str | None:
    """The name of the plain contender with its precision, or of the other where that one is missing."""
    order = (PLAIN_FP32, PLAIN_BF16) if result.exact else (PLAIN_BF16, PLAIN_FP32)
    return next((name for name in order if name in results), None)


def times_faster(than: Result, result: Result) -> dict[str, float]:
    """Quartiles, over rounds, of the tokens per second against those of ``than`` in the same round."""
    pairs = zip(than.seconds, result.seconds, strict=True)
    return quartiles(theirs / own for theirs, own in pairs)


def row(result: Result, results: Mapping[str, Result], *, dtype: str, tokens_per_step: int) -> dict[str, Any]:
    """What the JSON has of one contender."""
    reference = reference_of(result, results)
    device = result.device_bytes
    return {
        "rounds": len(result.seconds),
        "seconds_per_step": quartiles(result.seconds),
        "tokens_per_second": quartiles(tokens_per_step / seconds for seconds in result.seconds),
        "times_tokens_per_second_of": {
            name: times_faster(results[name], result) for name in PLAIN if name in results
        },
        "device_bytes": None if device is None else {**device, "peak": sum(device.values())},
        "host_bytes": result.host_bytes,
        "loss": {**asdict(result.losses), "compared_with": reference},
        "refused": None
        if reference is None
        else verdict(result.losses, results[reference].losses, dtype=dtype, clips=result.clips),
        "remark": result.remark,
    }


def print_table(rows: Mapping[str, dict[str, Any]]) -> None:
    """A line for each contender of a group."""

    def spread(values: Mapping[str, float], form: str) -> str:
        lower, median, upper = (format(value, form) for value in values.values())
        return f"{median} ({lower}-{upper})"

    def mib(amount: int | None) -> str:
        return "-" if amount is None else f"{amount / 2**20:,.0f}"

    plain = [name for name in PLAIN if name in rows and "skipped" not in rows[name]]
    heads = ["tokens/s", *(f"x {name}" for name in plain)]
    print(
        "medians (quartiles) over rounds; MiB: device at rest + step = peak; host resident, pinned, counted"
    )
    print(f"{'':13}" + "".join(f"{head:>24}" for head in heads) + f"{'device MiB':>28}{'host MiB':>24}  loss")
    for name, row in rows.items():
        if "skipped" in row:
            print(f"{name:13}  left out: {row['skipped']}")
            continue
        ratios = row["times_tokens_per_second_of"]
        cells = [spread(row["tokens_per_second"], ",.0f"), *(spread(ratios[other], ".3f") for other in plain)]
        device, host = row["device_bytes"] or {}, row["host_bytes"]
        held = (
            " + ".join(mib(device.get(key)) for key in ("at_rest", "step")) + f" = {mib(device.get('peak'))}"
        )
        hosts = ", ".join(mib(host.get(key)) for key in ("resident", "pinned_by_pytorch", "counted"))
        losses = f"{row['loss']['before']:.4f} -> {row['loss']['after']:.4f}"
        print(f"{name:13}" + "".join(f"{cell:>24}" for cell in cells) + f"{held:>28}{hosts:>24}  {losses}")
        for word, text in (("REFUSED", row.get("refused")), ("note", row["remark"])):
            if text:
                print(f"{'':13}  {word}: {text}")
        if row["loss"]["compared_with"] is None:
            print(f"{'':13}  note: no plain contender is there to compare the loss with")
