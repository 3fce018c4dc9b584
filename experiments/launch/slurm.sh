#!/bin/bash
# sbatch experiments/launch/slurm.sh experiments/catalogs.py --run-dir /shared/runs/catalogs
# One task a GPU: JAX lets each task of SLURM see one, by its number on the node.
#SBATCH --job-name=moe
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --gpu-bind=none
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

# SLURM sends SIGTERM three minutes before the end: the run is saved and ends with 143. A lost
# process ends with 75, or 134 when JAX's heartbeats notice first. Each of them goes on when requeued.
srun --kill-on-bad-exit=1 --label moe train "$@"
code=$?
case $code in
  75 | 134 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
