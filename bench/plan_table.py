"""The table of `bench.plan_time`."""

from __future__ import annotations

from bench.markdown import Report, spread, table


def plan_table(report: Report) -> list[str]:
    rows = [
        [
            f"{name}: {row['shape']['n_layer']} layers of {row['shape']['n_embd']}, "
            f"{row['shape']['batch_size']} x {row['shape']['context']} tokens",
            f"{row['predicted_seconds'] * 1e3:.0f}",
            spread(row["measured_seconds"], ".0f", 1e3),
            f"{row['ratio']:.2f}",
            spread(row["ratio_by_rounds"]),
        ]
        for name, row in report["models"].items()
    ]
    heads = ["GPT-2", "predicted, ms", "measured, ms", "predicted over measured", "by rounds"]
    machine = report["machine"]
    return [
        f"A step, fp32, on the thread backend of {machine['name']}, predicted from what "
        "`streamer calibrate` measures.",
        "",
        *table(heads, rows),
    ]
