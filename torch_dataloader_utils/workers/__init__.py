"""Worker processes: how they start and end, what they are sent, and how batches come back.

It imports `reading` and what is below it. An assignment enters a worker by its `channel`. The `producer` collates and
packs batches into `messages`, whose memory is shared with the training process, and these leave.
"""
