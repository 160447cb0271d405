"""What the machine is: readers that turn the system's text into frozen facts. No model code."""
