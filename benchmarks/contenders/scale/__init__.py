"""Many files, row groups and ranks: a process for each measurement, which prints its figures as a line of JSON."""
