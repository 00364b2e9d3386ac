#!/bin/sh
# Prints the newest released CPython >= 3.12 that works, from PATH or ~/.pyenv/versions; exits 1 when there is none.
# Each candidate is run: a pyenv shim lies on PATH even where its version is not selected, and some systems lack ensurepip.
for minor in 19 18 17 16 15 14 13 12; do
  works="import ensurepip, sys, sysconfig, venv
sys.exit(sys.version_info[:2] != (3, $minor) or sys.version_info.releaselevel != 'final'
    or sys.implementation.name != 'cpython' or bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
  # Within ~/.pyenv/versions the highest patch release comes first.
  for python in "python3.$minor" $(ls -d "$HOME/.pyenv/versions/3.$minor"*/bin/python 2>/dev/null | sort -rV); do
    "$python" -c "$works" 2>/dev/null || continue
    command -v "$python"
    exit 0
  done
done
exit 1
