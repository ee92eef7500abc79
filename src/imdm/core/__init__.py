"""What every room stands on: typed configs, names, errors, safe files, devices, memory, stopping, the terminal."""
