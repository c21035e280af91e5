"""Planning: pure decisions from a view of the fleet. No asyncio, no mlx, no clock."""
