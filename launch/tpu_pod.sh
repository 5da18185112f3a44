#!/usr/bin/env bash
# One jaxrl process a host of a Cloud TPU pod slice:
#   TPU=my-slice ZONE=us-east5-a launch/tpu_pod.sh configs/qwen2.5-math-7b/self.yaml --out DIR
# Arguments are those of `jaxrl train`; give --out, on a disk that all hosts see. Every host needs the checkout in
# ~/jaxrl with its environment: once, `make .venv/stamp EXTRAS=tpu` there.
# jax.distributed.initialize() takes no arguments: on Cloud TPU it finds the other hosts from the metadata server.
# Training in several processes does not work yet: each of them writes the run folder. Nor was this run on a TPU.
set -euo pipefail
: "${TPU:?name of the TPU slice}" "${ZONE:?zone of the TPU slice}"
: "${1:?usage: TPU=NAME ZONE=ZONE launch/tpu_pod.sh CONFIG --out DIR [--set KEY=VALUE]...}"

program='
import sys, jax
jax.distributed.initialize()
from jaxrl.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
'
gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all \
  --command "cd jaxrl && .venv/bin/python -c $(printf '%q' "$program") $(printf '%q ' "$@")"
