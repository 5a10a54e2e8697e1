"""What every kernel stands on: operators, launch configurations, the chip, checks, random numbers."""
