"""Read where the main thread was while a profile was taken: the samples that observe.frames left beside it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.rundir.captures import FRAMES_SUFFIX, TRACE_SUFFIX


@dataclass(frozen=True)
class Frames:
    """Stretches of samples in order of time."""

    stretches: list[tuple[int, int, str]]

    def most_often(self, low_ns: int, high_ns: int) -> str | None:
        """Return the line where the thread was longest between two moments; None without a sample in it."""
        spent = Counter[str]()
        for begin_ns, end_ns, line in self.stretches:
            inside_ns = min(end_ns, high_ns) - max(begin_ns, low_ns)
            if inside_ns >= 0:
                spent[line] += inside_ns + 1
        return spent.most_common(1)[0][0] if spent else None


def read_frames(path: Path) -> Frames | None:
    """Read the samples beside a profile (`path` of the profile); None without any. Raises UserError when the file is damaged."""
    file = path.with_name(path.name.removesuffix(TRACE_SUFFIX) + FRAMES_SUFFIX)
    if not file.is_file():
        return None
    try:
        return Frames([(int(begin), int(end), str(line)) for begin, end, line in json.loads(file.read_bytes())])
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
