"""What a device can do, measured in the few minutes for which one is at hand. docs/device_minutes.md shows the use."""
