"""What keeps a GPU computing: the set in its memory, the next batch ahead, the captured step.

device_data -> ahead, device_crop; captured_step; slow_imports
"""
