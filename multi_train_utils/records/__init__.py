"""What a run leaves behind: its checkpoint, its weights and the records of its epochs.

records -> checkpoint, saver, run_log, folder -> weights
"""
