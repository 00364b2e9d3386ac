"""Write conversations about sums as JSON lines in the layout of OpenAI: python make_chats.py OUTPUT [CONVERSATIONS]."""

import json
import random
import sys
from pathlib import Path

QUESTIONS = ("What is {a} plus {b}?", "Please add {a} and {b}.", "{a} + {b} = ?")


def conversation(draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return one to three questions, each with its answer."""
    messages = []
    for _ in range(draw.randint(1, 3)):
        a, b = draw.randint(0, 20), draw.randint(0, 20)
        messages.append({"role": "user", "content": draw.choice(QUESTIONS).format(a=a, b=b)})
        messages.append({"role": "assistant", "content": f"{a} plus {b} is {a + b}."})
    return {"messages": messages}


if __name__ == "__main__":
    output, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4000
    output.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    output.write_text("".join(json.dumps(conversation(draw)) + "\n" for _ in range(count)))
