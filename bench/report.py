"""Turn the JSON in bench/results into its README.md, and into the figures of the project's pages.

    python -m bench.report            # writes all
    python -m bench.report --check    # checks that they match the JSON; exit code 1 if not

In README.md and docs/benchmarks.md the lines between ``<!-- figures: NAME -->`` and
``<!-- end of figures -->`` are replaced. Results of a GPU lie in bench/results/gpu, where `bench/gpu.sh`
puts them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from bench.markdown import Report
from bench.will_it_work import readme_rows

README = RESULTS.parent.parent / "README.md"
BENCHMARKS = RESULTS.parent.parent / "docs" / "benchmarks.md"
GPU = "gpu"
#: Of figures that are one script's, on which page they are, and the results that they are of.
IN_README = {"architectures": "architectures.json", "tokens": "tokens_plain.json"}
IN_BENCHMARKS = {
    "adam": "adam.json",
    "disk": "disk_step.json",
    "hidden": "hidden_update.json",
    "moments": "moments.json",
    "optimizers": "optimizers.json",
    "quantized": "quantized.json",
    "ranks": "ranks.json",
    "sizes": "model_sizes.json",
}


def load(folder: Path) -> dict[str, Report]:
    """The results in ``folder`` and in its folder for GPUs, by path within ``folder``.

    Raises ValueError for one in the folder for GPUs that is not of a GPU whose kernels compute.
    """
    paths = sorted(folder.glob("*.json")) + sorted((folder / GPU).glob("*.json"))
    reports = {path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in paths}
    for name, report in reports.items():
        if name.startswith(f"{GPU}/") and not report.get("has_values", False):
            gpu = report["hardware"].get("gpu", "no GPU")
            raise ValueError(f"{folder / name} was measured on {gpu}, no GPU that computes: delete it")
    return reports


def results_readme(reports: Mapping[str, Report], pictures: Collection[str]) -> str:
    """A section for each of ``reports``, by file name, with its picture if it is one of ``pictures``."""
    lines = ["# Results", "", "Written by `python -m bench.report` from the JSON next to it.", ""]
    for name, report in reports.items():
        lines += [f"## [{name}]({name})", "", heading(report), "", *table_of(report), ""]
        picture = name.removesuffix("json") + "png"
        if picture in pictures:
            lines += [f"![{picture}]({picture})", ""]
    return "\n".join(lines)


def heading(report: Report) -> str:
    """The machine, the date and the versions of a result."""
    hardware, versions = report["hardware"], report["versions"]
    parts = [f"{hardware['processor']}, {hardware['cores']} cores"]
    if "gpu" in hardware:
        stands_in = "" if report.get("has_values", True) else ", which is no GPU: its kernels compute nothing"
        parts.append(f"{hardware['gpu']} (driver {hardware['driver']}){stands_in}")
    parts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return f"`{report['script']}`, {report['date'][:10]}: {'; '.join(parts)}."


def script_of(report: Report) -> Any:
    """The script of a result, with its `report_table`."""
    return import_module(report["script"].removesuffix(".py").replace("/", "."))


def table_of(report: Report) -> list[str]:
    """Its table in Markdown."""
    lines: list[str] = script_of(report).report_table(report)
    return lines


def figures(reports: Mapping[str, Report], shown: Mapping[str, str]) -> dict[str, str]:
    """The figures ``shown``, by name. A script's `readme_figure` is a table, or sentences."""
    found = {}
    for name, file in shown.items():
        figure = script_of(reports[file]).readme_figure(reports[file])
        found[name] = textwrap.fill(figure, 105) if isinstance(figure, str) else "\n".join(figure)
    return found


def readme_figures(reports: Mapping[str, Report]) -> dict[str, str]:
    """The figures of the project's README, by name."""
    of_rows = (reports[f"{name}.json"] for name in ("will_it_work", "model_sizes"))
    rows = "\n".join(readme_rows(*of_rows))
    return figures(reports, IN_README) | {"gpu": "\n".join(gpu_figures(reports)), "rows": rows}


def gpu_figures(reports: Mapping[str, Report]) -> list[str]:
    """The results of `bench.fits` and `bench.versus` on GPUs, or that there are none yet."""
    lines: list[str] = []
    for name, report in reports.items():
        if name.startswith(f"{GPU}/") and report["script"] in ("bench/fits.py", "bench/versus.py"):
            link = f"[figures](bench/results/{name})"
            gpu = report["hardware"].get("gpu", "no GPU")
            lines += ["", f"{gpu}, `{report['script']}` ({link}):", "", *table_of(report)]
    return lines[1:] or ["`bash bench/gpu.sh` measures them."]


def fill(page: Path, shown: Mapping[str, str]) -> str:
    """The text of ``page`` with each of ``shown`` between the marks of its name. Raises ValueError for marks
    that are missing or not known."""
    text = page.read_text()
    marks = re.findall(r"<!-- figures: (\S+) -->", text)
    if sorted(marks) != sorted(shown):
        raise ValueError(f"{page.name} has marks for {marks}, and there are figures for {list(shown)}")
    for name, figure in shown.items():
        marked = re.compile(rf"(<!-- figures: {name} -->\n).*?(<!-- end of figures -->)", re.DOTALL)
        text, count = marked.subn(lambda match, figure=figure: f"{match[1]}{figure}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"{page.name}: no '<!-- end of figures -->' after the mark of {name}")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    try:
        reports = load(RESULTS)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    pictures = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.png")}
    wanted = {
        RESULTS / "README.md": results_readme(reports, pictures),
        README: fill(README, readme_figures(reports)),
        BENCHMARKS: fill(BENCHMARKS, figures(reports, IN_BENCHMARKS)),
    }
    code = 0
    for path, text in wanted.items():
        if path.exists() and path.read_text() == text:
            continue
        if options.check:
            print(f"{path} is not what the JSON says: run python -m bench.report")
            code = 1
        else:
            path.write_text(text)
            print(f"written: {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
