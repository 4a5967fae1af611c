"""The shared core of the three training scripts: one idea a file, imports run downwards only.

trainer -> data_pipeline, device_data, train_step, captured_step, checkpoints, run_log
        -> augmentation, failures, train_eval_utils -> distributed_utils
"""
