#!/usr/bin/env bash
# What `make train` runs: the launch script on all visible GPUs, else on two CPU processes.
#     scripts/make_train.sh FOLDER [option of the training script ...]
# FOLDER has one sub-folder of photos per class; "" draws a sample set and trains on that.
set -euo pipefail
cd "$(dirname "$0")/.."
data=$1
shift

processes=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
options=()
if [ "$processes" = 0 ]; then
    processes=2
    options+=(--device cpu)
    # As torchrun would, but without its warning; the trainer gives each process its share of CPUs.
    export OMP_NUM_THREADS=1
fi

if [ -n "$data" ]; then
    options+=(--data-path "$data")
    output='' photo=photo.jpg
else
    .venv/bin/python prepare_data.py sample
    # A folder of its own, so that the weights of your own training stay.
    output=sample_run/ photo=sample_photos/daisy/00000.jpg
    # Few steps on easy pictures: a higher rate than the default, and none left at the end. The
    # trainer multiplies rate and batch by the number of processes, so divide: the same training
    # on one GPU as on eight.
    batch=$((32 / processes > 1 ? 32 / processes : 1))
    rate=$(.venv/bin/python -c "print(0.008 / $processes)")
    options+=(--data-path sample_photos --output-dir sample_run --weights "" --image-size 64
              --epochs 10 --batch-size "$batch" --lr "$rate" --lrf 0.01 --nesterov)
fi

command=(.venv/bin/torchrun --standalone "--nproc_per_node=$processes"
         train_multi_gpu_using_launch.py "${options[@]}" "$@")
echo
echo "The command, for you to change and run again:"
printf '   '
printf ' %q' "${command[@]}"
printf '\n\n'
"${command[@]}"

# The training itself has just printed the accuracy and where the weights are.
echo
echo "Curves:          .venv/bin/tensorboard --logdir=${output}runs"
echo "                 then open http://localhost:6006/"
echo "Try it:          .venv/bin/python predict.py $photo --weights ${output}weights/best.pth"
echo "Your own photos: make train DATA=folder     (one sub-folder of photos per class)"
