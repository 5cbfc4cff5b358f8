"""The training process: the DataLoader, its iterations, and the state of the epoch.

It imports `workers`, `reading`, `checkpoint` and what is below them. Batches leave in `data_loader`, where `iteration`
counts them as delivered; a state enters and leaves at `epoch`.
"""
