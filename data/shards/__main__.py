"""`python -m data.shards verify DIR`: compare every shard with the manifest's SHA-256."""

import argparse
import sys

from tqdm import tqdm

from data.shards.reader import ShardSet
from memer.errors import run_command


def main() -> int:
    """Parse the command line and verify."""
    parser = argparse.ArgumentParser(prog="python -m data.shards", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verify = verbs.add_parser("verify", help="read every shard and compare its SHA-256")
    verify.add_argument("root", metavar="DIR")
    arguments = parser.parse_args()
    shards = ShardSet(arguments.root)
    names = list(tqdm(shards.verify(), total=len(shards.manifest["shards"]) + 1, unit="file", desc="verify"))
    print(f"{shards.root}: {len(names)} files are as written, {shards.manifest['num_frames']} frames")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
