"""`kt bench`: the measurements, a command each"""
