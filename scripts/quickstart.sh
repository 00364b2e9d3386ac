#!/bin/sh
# The quickstart: real text to a trained model, each stage skipped or resumed when it was already done.
# Usage: BIN=.venv/bin CORPUS=data/quickstart sh scripts/quickstart.sh [config overrides]
set -eu
ridge="$BIN/ridge"
config=configs/quickstart.yaml
run=runs/quickstart
texts=${TEXTS:-$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')}
select="--include **/*.py --exclude site-packages --exclude dist-packages --exclude test --exclude tests --exclude idle_test --holdout validation=0.05"
set -f   # the globs are for ridge, not for the shell

say() { printf '\n== %s\n' "$*"; }

say "1/5 tokenizer: byte-pair encoding trained on the Python standard library ($texts)"
"$ridge" data train-tokenizer --input "$texts" $select --vocab-size 4096 --output "$CORPUS-tokenizer/tokenizer.json"

say "2/5 corpus: the standard library's source files as token shards, some files held out for validation"
"$ridge" data prepare --input "$texts" $select --tokenizer "$CORPUS-tokenizer/tokenizer.json" --gzip-baseline --output "$CORPUS"

say "3/5 training (Ctrl-C saves and stops; the same command resumes)"
"$ridge" train "$config" "$@"

say "4/5 evaluation of the saved model on the held-out files"
"$ridge" evaluate "$run"

say "5/5 a sample of generated code"
"$ridge" generate "$run" --max-tokens 110 --temperature 0.6 --top-p 0.9 --seed 3 --prompt 'class Reader:
    """Reads lines from a file."""

    def __init__(self, '

cat <<END

== Next
  see the curves        $BIN/tensorboard --logdir $run/tensorboard
  train longer          $ridge train $config trainer.steps=2000        (continues from the last checkpoint)
  the resolved config   $ridge config show $config
  preview the sharding  $ridge shardings configs/examples/llama-3.2-1b-8gpu.yaml --devices 8
  export                $ridge convert to-hf $run exported/
  plan a bigger run     start from configs/examples/, see README.md
END
