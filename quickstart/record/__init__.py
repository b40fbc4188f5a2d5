"""What a run leaves behind, on the terminal and on disk. Imports no trainer, and no trainer is needed to read it.

capture: who writes to the terminal and what goes to the log. console: the lines, bar and table that a user sees.
rollouts, state, tensorboard, run_record: one kind of file each. recorder: all of them behind five calls.
"""
