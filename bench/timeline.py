"""Draw some steps of a run as a timeline: a row per lane, and the moments that compute waited.

    python bench/timeline.py runs/gpt2-demo/trace.json timeline.png --steps 2

Reads the Chrome trace that `streamer train` writes; needs matplotlib (the extra [plot]). The picture in the
README has layers wide enough for visible copies:

    streamer train configs/gpt2-demo.toml --output runs/wide --steps 6 --set model.args.n_embd=1024 \\
        --set model.args.n_head=16 --set train.per_device_train_batch_size=2 --set train.learning_rate=1e-4
    python bench/timeline.py runs/wide/trace.json bench/results/timeline.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from streamer.cli.plan.timeline import draw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", type=int, default=2, help="how many of the last steps to show (2)")
    arguments = parser.parse_args()
    draw(arguments.trace, arguments.picture, steps=arguments.steps)


if __name__ == "__main__":
    main()
