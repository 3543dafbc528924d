"""Makes what the application needs before it starts: a key for tokens, and the shelters.

python -m emergency.prepare --keys keys.json --shelters shelters.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from emergency.reports import encode
from emergency.tokens import make_keys
from emergency.town import build_town, draw_shelters


def main() -> None:
    """Read the arguments, and write the files."""
    parser = argparse.ArgumentParser(description="Prepares the emergency application.")
    parser.add_argument("--keys", type=Path, required=True, help="a JSON Web Key Set for broker.token_keys_file")
    parser.add_argument("--shelters", type=Path, required=True, help="for `dynamoth dataset load shelters`")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_keys(options.keys)
    shelters = draw_shelters(build_town(Random(options.seed)), Random(options.seed))
    options.shelters.write_bytes(b"".join(encode(each) + b"\n" for each in shelters))


if __name__ == "__main__":
    main()
