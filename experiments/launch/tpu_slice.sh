#!/bin/bash
# experiments/launch/tpu_slice.sh NAME ZONE experiments/catalogs.py --run-dir /shared/runs/catalogs
# The same command on every worker of a Cloud TPU slice; /shared is a file system all of them mount,
# and moe with JAX for TPU (pip install -U 'jax[tpu]') is installed on each.
name=$1 zone=$2
shift 2
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
  --command "cd moe && exec moe train $(printf '%q ' "$@") --distributed"
