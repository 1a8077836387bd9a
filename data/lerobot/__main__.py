"""Check a LeRobot data set: `python -m data.lerobot ROOT [--mode strict] [--out report.json]`.

Prints the report as lines; exit code 0 fine or warnings, 1 errors, 2 usage, 3 no data set there.
"""

import argparse
import sys

from data.lerobot.findings import write_report
from data.lerobot.reader import LeRobotReader
from memer.errors import run_command


def main(argv: list[str] | None = None) -> int:
    """Check one data set and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m data.lerobot", description=__doc__)
    parser.add_argument("root", help="folder that holds meta/")
    parser.add_argument("--mode", choices=("lenient", "strict"), default="lenient")
    parser.add_argument("--label-source", default="native")
    parser.add_argument("--require-labels", action="store_true", help="episodes without labels are faults")
    parser.add_argument("--out", help="write the report as JSON")
    options = parser.parse_args(argv)

    def command() -> int:
        reader = LeRobotReader(
            options.root,
            mode=options.mode,
            label_source=options.label_source,
            require_labels=options.require_labels,
        )
        report = reader.report()
        print("\n".join(reader.report_lines()))
        if options.out:
            write_report(report, options.out)
        return 1 if report["errors"] else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
