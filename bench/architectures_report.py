"""The table of `bench.architectures`."""

from __future__ import annotations

from bench.markdown import Report, table


def architectures_table(report: Report) -> list[str]:
    """A row for each architecture: how far streamed training is from plain PyTorch's, under either policy."""
    heads = [
        "architecture",
        "kind",
        "layers streamed",
        "first loss and gradients",
        f"losses of {report['steps']} steps",
        "norms",
        "final weights",
    ]
    rows = []
    for name, row in report["rows"].items():
        policies = [row["recompute"], row["keep"]]
        worst = {key: max(policy[key] for policy in policies) for key in ("losses", "norms", "weights")}
        rows.append(
            [
                f"{name} ({row['what']})" if row["what"] else name,
                row["kind"],
                str(policies[0]["layers"]),
                _first_step([policy["first_loss_equal"] for policy in policies], policies, row["order"]),
                *(f"{value:.0e}" for value in worst.values()),
            ]
        )
    equal = sum(map(_is_equal, report["rows"].values()))
    about = (
        f"{equal} of {len(rows)} architectures have the first loss and all first gradients to the bit "
        "(fp32, dropout on, both activation policies). Differences: of gradients, over the model's largest; "
        "of losses and norms, relative; of weights, absolute. `state_dict` has the same keys in order."
    )
    return [about, "", *table(heads, rows)]


def architectures_figure(report: Report) -> str:
    """A sentence."""
    equal = sum(_is_equal(row) for row in report["rows"].values())
    return (
        f"Unmodified Hugging Face models work. Of {len(report['rows'])} architectures {equal} have the first "
        "loss and all first gradients equal to plain PyTorch's to the bit; in the others sums are added up "
        "in another order ([table](bench/results/README.md#architecturesjson))."
    )


def _is_equal(row: Report) -> bool:
    policies = [row["recompute"], row["keep"]]
    return all(policy["first_loss_equal"] and not policy["gradients"] for policy in policies)


def _first_step(losses: list[bool], policies: list[Report], order: str) -> str:
    gradients = max(policy["gradients"] for policy in policies)
    if all(losses) and not gradients:
        return "equal"
    loss = "loss equal" if all(losses) else "loss differs"
    return f"{loss}, gradients {gradients:.0e}" + (f" (sums in another order: {order})" if order else "")
