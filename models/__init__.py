"""The pure core: arithmetic on values and frames. No cloud, no clock, no disk, no random globals."""
