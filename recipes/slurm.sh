#!/usr/bin/env bash
# Several machines under SLURM: one launcher on each, which starts a process for each of its GPUs.
#
#   sbatch recipes/slurm.sh recipes/pretrain.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name … --output_dir out
#   CONFIG=recipes/accelerate/ddp.yaml sbatch --nodes 4 recipes/slurm.sh recipes/sft.py …
#
# Start it in the repository's root, with the virtual environment active. The arguments are a recipe and its flags.
#
#   CONFIG  accelerate's configuration
#   GPUS    processes a machine
#   PORT    where the processes meet, on the first machine

#SBATCH --job-name=hf-cce
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by sbatch, which this script is for}" # SLURM runs a copy of this file from elsewhere

export CONFIG=${CONFIG:-recipes/accelerate/fsdp2.yaml}
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
export PORT=${PORT:-29500}
MAIN=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | head -n 1)
export MAIN

# In single quotes: $SLURM_NODEID differs from machine to machine.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
    accelerate launch --config_file "$CONFIG" \
        --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes "$((SLURM_NNODES * GPUS))" \
        --main_process_ip "$MAIN" --main_process_port "$PORT" \
        "$@"
' bash "$@"
