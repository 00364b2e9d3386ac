"""Write preference pairs about sums as JSON lines: python make_pairs.py OUTPUT [PAIRS]. The short answer is preferred to the sentence."""

import json
import random
import sys
from pathlib import Path

from make_chats import QUESTIONS


def pair(draw: random.Random) -> dict[str, str]:
    """Return a question with a chosen and a rejected answer."""
    a, b = draw.randint(0, 20), draw.randint(0, 20)
    return {"prompt": draw.choice(QUESTIONS).format(a=a, b=b), "chosen": f"{a + b}.", "rejected": f"{a} plus {b} is {a + b}."}


if __name__ == "__main__":
    output, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    output.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    output.write_text("".join(json.dumps(pair(draw)) + "\n" for _ in range(count)))
