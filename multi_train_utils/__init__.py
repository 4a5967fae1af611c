"""The shared core of the three training scripts.

Read trainer.py, the recipe, then train_eval_utils.py, its loop and its step. The rest is for
another day:

    distributed_utils.py  environment, GPU, process group, reduce_value
    options.py            the command line
    data_pipeline.py      the sampler; from files to batches
    augmentation.py       crops, and the place for augmentations of your own
    safety/               how a run ends, and how the ranks agree
    speed/                captured step, images in GPU memory, the next batch ahead
    records/              checkpoints, weights, the records of a run

Imports run downwards only:

    trainer -> speed, records -> data_pipeline -> augmentation, safety -> train_eval_utils
            -> options -> distributed_utils
"""
