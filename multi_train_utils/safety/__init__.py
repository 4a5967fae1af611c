"""What protects a run: it ends as a whole, says why once, and never waits for ever.

guard -> agreement, patience, signals -> ending -> torch_errors; processes, rendezvous for the doors
"""
