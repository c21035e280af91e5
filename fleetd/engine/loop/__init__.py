"""The compute loop of a worker: whose turn it is. The only room that knows `ScheduledSequence`."""
