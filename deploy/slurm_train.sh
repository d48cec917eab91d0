#!/usr/bin/env bash
# A run on several nodes, one torchrun a node:
#
#   sbatch --nodes=4 deploy/slurm_train.sh train_fsdp2.py --config-name L2_lingua_8b \
#       checkpoint.ckpt_dir=/shared/checkpoints checkpoint.save_every_n_steps=500 checkpoint.resume_from_checkpoint=true
#
# Submit it from the project folder, with the virtual environment active, both on a file system that all nodes see.
# A requeued job (preemption, a lost node) goes on from its last committed checkpoint.
#SBATCH --job-name=native-te
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# Single quotes: SLURM_NODEID differs from node to node, so each task expands the line for itself.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
    exec torchrun --nnodes="$SLURM_NNODES" --node_rank="$SLURM_NODEID" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" \
        --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "$@"
' torchrun "$@"
