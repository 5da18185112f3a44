#!/usr/bin/env bash
# One jaxrl process a node under SLURM:
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh configs/qwen2.5-math-7b/self.yaml --out runs/self-7b
# Arguments are those of `jaxrl train`; give --out, on a disk that all nodes see. Submit from the top of the checkout.
# jax.distributed.initialize() takes no arguments: it reads processes and coordinator from SLURM's environment.
# Training in several processes does not work yet: each of them writes the run folder. `--dry-run` does.
#SBATCH --job-name=jaxrl
#SBATCH --ntasks-per-node=1
set -euo pipefail
: "${1:?usage: sbatch [options] launch/slurm.sh CONFIG --out DIR [--set KEY=VALUE]...}"

srun .venv/bin/python -c '
import sys, jax
jax.distributed.initialize()
from jaxrl.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
' "$@"
