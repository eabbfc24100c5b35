#!/usr/bin/env bash
# Two nodes, two ranks on each. Submit with: sbatch slurm.sh
#SBATCH --job-name=collectives
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
set -euo pipefail

# Slurm copies this file, so the program is found where sbatch was called.
program=${SLURM_SUBMIT_DIR:-.}/torch_ddp.py
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export OMP_NUM_THREADS=1
# All ranks of the job, and nobody else, know this secret; srun passes it on.
COLLECTIVES_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export COLLECTIVES_SECRET
# export COLLECTIVES_SOCKET_IFNAME=ib0  # where the default route is not the fast network

# One launcher on each node; torchrun starts the ranks there and restarts them together.
srun torchrun \
  --nnodes="$SLURM_NNODES" \
  --nproc-per-node="$SLURM_CPUS_PER_TASK" \
  --rdzv-id="$SLURM_JOB_ID" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$head:${RENDEZVOUS_PORT:-29500}" \
  "$program"
