"""This machine awake and asleep: kept awake while it computes, told when it has slept."""
