#!/usr/bin/env bash
# A run on several nodes, one torchrun agent a node:
#
#   sbatch deploy/slurm_train.sh
#
# Submit it from the project folder, with the virtual environment active, both on a file system that all nodes see.
# Change five values: nodes, GPUs per node and time, right below, and SHARED and RUN under them.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --job-name=native-te
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
SHARED=/shared/native-te # checkpoints and logs; every node sees it
RUN=(train_fsdp2.py --config-name L2_lingua_8b checkpoint.save_every_n_steps=500)
set -euo pipefail

# What ends a job early. The workers answer both signals: they finish their step, save, and leave with an error.
# - The time limit: three minutes before, Slurm sends USR1 to this script, which hands it on and requeues the job.
# - Preemption: Slurm sends TERM to the agents and requeues the job by itself, as it does when a node fails.
# The next start finds the checkpoint. A crash after max_restarts ends the job.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150 # seconds for saving, from torch 2.13 on; before, agents wait for 30
# A store of its own for every restart: workers that find the addresses of those before them fail or hang.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
mkdir -p "$SHARED/logs"
srun --kill-on-bad-exit=1 --open-mode=append --output="$SHARED/logs/%x_%j_%n.log" \
    torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_backend=c10d --rdzv_endpoint="${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000))" --rdzv_id="$SLURM_JOB_ID" \
    --max_restarts=3 --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "${RUN[@]}" checkpoint.ckpt_dir="$SHARED/checkpoints" checkpoint.resume_from_checkpoint=true &
srun_pid=$!

out_of_time=false
trap 'out_of_time=true; kill -USR1 "$srun_pid" || true' USR1 # srun passes it to the agents
trap 'echo "told to end: waiting for the agents"' TERM
status=0
while true; do # a signal interrupts wait
    wait "$srun_pid" && status=0 || status=$?
    kill -0 "$srun_pid" 2> /dev/null || break
done
if [[ $out_of_time == true && $status -ne 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
