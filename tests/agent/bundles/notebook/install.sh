#!/usr/bin/env bash
notebook_root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$notebook_root/lib:$PYTHONPATH"
export NOTEBOOK_GREETING="two
lines; with 'quotes'"
notebook_hello() { echo "hello from $NOTEBOOK_GREETING"; }
echo '{}' > /root/.notebook-env
