#!/usr/bin/env bash
# Start a speechdp command over the hosts of a hostfile with mpirun: launch/mpirun.sh HOSTFILE train DATA RUN ...
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: launch/mpirun.sh HOSTFILE SUBCOMMAND ..., e.g. launch/mpirun.sh hostfiles/local2 train DATA RUN" >&2
    exit 2
fi
hostfile=$1
shift
python=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
[ -x "$python" ] || python=python
exec "$python" -m speechdp launch --launcher mpirun --hostfile "$hostfile" -- "$@"
