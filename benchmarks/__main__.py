"""The one way to run a benchmark: `python -m benchmarks NAME [options]`."""

from __future__ import annotations

import argparse
import sys

from benchmarks import registry


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words and words[0] in registry.BENCHMARKS:
        return registry.run(words[0], words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [--list] NAME [options]",
        description="Speed and scale, each benchmark by its name.",
        epilog=f"{registry.listing()}\n\nOptions of one: python -m benchmarks NAME --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="names, and which need a GPU")
    parser.add_argument("name", nargs="?", metavar="NAME", choices=registry.BENCHMARKS)
    if not parser.parse_args(words).list:
        parser.error("which one? --list has their names")
    print(registry.listing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
