"""The training process: the DataLoader, its iterations, and the state of the epoch.

It imports `workers`, `reading`, `checkpoint` and what is below them. Batches leave in `data_loader`, where `iteration`
counts them as delivered; a state enters and leaves at `epoch`. What epochs are planned from is one frozen value,
`epoch_plans.EpochPlans`, which a call that changes the run replaces.
"""
