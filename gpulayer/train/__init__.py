"""The Trainer: the only layer that imports torch at module level.

trainer -> gang -> loop -> {strategy, data, optimizers, precision, logbook, hooks} -> state -> {events, arguments}
"""
